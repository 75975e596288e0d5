"""Continuations of one text as a tree."""

from decoding.token_tree import TokenTree


def test_what_continuations_have_in_common_is_there_once() -> None:
    tree = TokenTree()
    assert not tree
    assert [tree.add(tokens) for tokens in ([5, 6, 7], [5, 6], [5, 8], [9], [5, 8, 7])] == [2, 1, 3, 4, 5]
    assert (tree.draft.tokens, tree.draft.parents) == ([5, 6, 7, 8, 9, 7], [-1, 0, 1, 0, -1, 3])
    assert tree.find([5, 8, 7, 1]) == [0, 3, 5]
    assert tree.find([7]) == []
    assert (len(tree), tree.size_with([5, 8, 2, 2]), tree.size_with([5])) == (6, 8, 6)
