"""Trees of paths with common prefixes."""

from decoding.drafts.draft import Draft, TokenTree


def test_common_prefixes_are_stored_once() -> None:
    tree = TokenTree()
    assert not tree
    assert [tree.add(tokens) for tokens in ([5, 6, 7], [5, 6], [5, 8], [9], [5, 8, 7])] == [2, 1, 3, 4, 5]
    assert (tree.draft.tokens, tree.draft.parents) == ([5, 6, 7, 8, 9, 7], [-1, 0, 1, 0, -1, 3])
    assert tree.find([5, 8, 7, 1]) == [0, 3, 5]
    assert tree.find([7]) == []
    assert (len(tree), tree.size_with([5, 8, 2, 2]), tree.size_with([5])) == (6, 8, 6)


def test_a_node_keeps_its_highest_probability() -> None:
    tree = TokenTree()
    tree.add([5, 6], [0.5, 0.9])
    tree.add([5, 7], [0.8, 0.1])
    tree.add([5, 6], [0.2, 0.3])
    assert tree.draft.probabilities == [0.8, 0.9, 0.1]
    assert tree.add([]) == -1


def test_children_are_the_inverse_of_parents() -> None:
    assert Draft([5, 6, 7, 8], [-1, 0, -1, 0]).children() == [[0, 2], [1, 3], [], [], []]
