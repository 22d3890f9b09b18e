import itertools

import pytest

from octavo.cache.hashing import Hasher, Namespace, pack

DIFFERENT = [
    Namespace("m"),
    Namespace("m", salt=""),
    Namespace("m", salt="a"),
    Namespace("m", tenant="t"),
    Namespace("m", tenant="ab", salt="c"),
    Namespace("m", tenant="a", salt="bc"),
    Namespace("m", adapter="a"),
    Namespace("n"),
    Namespace("m", salt="\ud800"),
]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(DIFFERENT, 2)))
def test_no_two_namespaces_share_a_digest(one, other):
    assert one.encode() != other.encode()
    assert Hasher().root(one) != Hasher().root(other)


def test_equal_namespaces_share_it():
    assert Hasher().root(Namespace("m", "t", None)) == Hasher().root(Namespace("m", "t"))


def test_a_digest_depends_on_all_that_came_before():
    chain, root = Hasher().chain, Hasher().root(Namespace())
    one, two = pack([1, 2]), pack([3, 4])
    assert chain(chain(root, one), two) != chain(root, two)
    assert chain(root, one) == chain(root, one)


def test_a_cut_hash_has_few_values():
    hasher = Hasher(bits=8)
    root = hasher.root(Namespace())
    assert len({hasher.chain(root, pack([i])) for i in range(2000)}) <= 256
