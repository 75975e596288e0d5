"""First words of what users ask. A small model left to itself asks for little else than essays and explanations."""

OPENINGS = (
    # questions
    "What is", "What are the", "Why do", "Why is", "How does", "How do I", "How can I", "When did", "Who was", "Who is",
    "Where", "Is it true that", "Can you explain", "Explain", "Describe", "Define", "Compare", "What is the difference",
    "Tell me about", "Give me some advice on", "I have a problem with my", "I'm planning", "I want to learn",
    "Should I", "What happens when", "Solve the following problem:", "Calculate", "If a", "A train",
    # code
    "Write a Python function that", "Write a Python program to", "Write a function in JavaScript that",
    "Write a SQL query", "Write a bash script that", "Write a C++ program", "Write HTML and CSS for", "Implement a",
    "Fix the bug in this code:\n\n```python\n", "What does this code do?\n\n```python\ndef", "Write unit tests for",
    "How do I use", "Refactor this function:\n\n```python\ndef", "Write a regular expression that", "Write a class",
    # data
    "Return a JSON object with", "Give me a JSON list of", "Write JSON that describes",
    "Extract the names and dates from this text as JSON:\n\n", "Convert this table to JSON:\n\n|", "Write a YAML file",
    "Make a Markdown table of", "Classify the sentiment of this review as positive or negative:\n\n",
    # lists
    "List", "Give me a list of", "Name five", "What are ten", "List the steps to", "Give three reasons why",
    "Provide a step-by-step guide to", "Make a checklist for", "Brainstorm ideas for", "Create a weekly plan for",
    # texts
    "Rewrite the following sentence:\n\n", "Rewrite this text to make it more formal:\n\n",
    "Make this text shorter and clearer:\n\n", "Correct the grammar in this text:\n\n",
    "Summarize the following text in two sentences:\n\n", "Translate the following sentence into", "Paraphrase:",
    "Write an email to", "Write a letter", "Write a short story about", "Write a poem about", "Write a product",
    "Write a tweet", "Write a blog post about", "Write a paragraph about", "Write a dialogue between",
    "Answer the question using this text:\n\n", "Continue the following story:\n\n", "Suggest a title for",
    "Hi", "Hello",
)  # fmt: skip
