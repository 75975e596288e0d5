"""Built-in prompts for comparing decoding strategies. Must not know what is done with them."""

PROMPTS = (
    "Large Language models are",
    "Barack Obama was",
    "Decoding strategy is important because",
    "A good recipe for Halloween is",
    "Stanford is known for",
)
MAX_TOKENS = 50  # of each answer
