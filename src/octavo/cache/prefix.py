"""The prefix index: finds the sealed blocks of a token prefix.

Nodes form one tree per namespace. A node stands for `block_size` tokens after its parent and carries, by
layer group, the sealed block with their K and V, or None where that was reclaimed. It is found by its chained
digest and believed only if its parent is the very node matched before and its token ids compare equal, so a
collision of digests is a miss and never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.blocks import Block, Lease
from octavo.cache.hashing import Hasher, Namespace, pack
from octavo.cache.layout import CacheLayout
from octavo.cache.receipt import Miss

REMEMBERED = 65_536
FOREIGN_NAMESPACES = 8


class Node:
    """`children` counts the nodes below; `parent` is None for the root of a namespace."""

    __slots__ = ("blocks", "children", "depth", "digest", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, digest: bytes, groups: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.digest = digest
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = 0
        self.blocks: list[Block | None] = [None] * groups


@dataclass(frozen=True, slots=True)
class Match:
    """`nodes` can be reused by every layer group. `known` more or fewer were found, `blocked` says that more
    could be if they need not be exact."""

    nodes: Sequence[Node] = ()
    known: int = 0
    blocked: bool = False

    @property
    def depth(self) -> int:
        return len(self.nodes)


class PrefixIndex:
    """Nodes by digest. `hash_bits` below 256 is a test hook; `collisions` counts rejected digests."""

    def __init__(self, layout: CacheLayout, hash_bits: int = 256) -> None:
        self.layout = layout
        self.collisions = 0
        self.nodes: dict[bytes, Node] = {}
        self.roots: dict[Namespace, Node] = {}
        self._hasher = Hasher(hash_bits)
        self._groups = len(layout.groups)
        self._full = [g for g, group in enumerate(layout.groups) if group.window is None]
        self._windowed = [g for g, group in enumerate(layout.groups) if group.window is not None]
        self._firsts: dict[bytes, dict[Namespace, None]] = {}
        self._reclaimed: OrderedDict[bytes, None] = OrderedDict()

    def hash(self, lease: Lease, token_ids: Sequence[int], blocks: int) -> None:
        """Extend the keys and digests of `lease` to its first `blocks` blocks."""
        keys, digests, size = lease.keys, lease.digests, self.layout.block_size
        if len(keys) >= blocks:
            return
        digest = digests[-1] if digests else self._hasher.root(lease.namespace)
        chain, packed = self._hasher.chain, pack(token_ids[len(keys) * size : blocks * size])
        width = len(packed) // (blocks - len(keys))
        for start in range(0, len(packed), width):
            key = packed[start : start + width]
            digest = chain(digest, key)
            keys.append(key)
            digests.append(digest)

    def reusable(self, lease: Lease, tokens: int) -> int:
        """The most blocks that a hit covers if `lease` is to hold `tokens` tokens: one position is computed,
        and all from where the lease begins to drop."""
        return (lease.shared(tokens) - 1) // self.layout.block_size

    def find(self, lease: Lease, token_ids: Sequence[int]) -> Match:
        """The longest `reusable` prefix of `token_ids`."""
        self.hash(lease, token_ids, lease.shared(len(token_ids)) // self.layout.block_size)
        if not lease.reuse:
            return Match()
        limit = self.reusable(lease, len(token_ids))
        path = self._walk(lease.namespace, lease.digests, lease.keys, limit)
        depth = self._depth_served(path, lease.exact)
        blocked = depth < len(path) and lease.exact and depth < self._depth_served(path, exact=False)
        return Match(path[:depth] if depth < len(path) else path, len(path), blocked)

    def why(self, lease: Lease, token_ids: Sequence[int], match: Match) -> Miss:
        """The reason why `match` is no longer, the most specific that holds."""
        size = self.layout.block_size
        at: int | None = match.depth * size
        if at == len(token_ids) - 1:
            at = None
        if not lease.reuse:
            return Miss("disabled", at)
        if match.depth == (len(token_ids) - 1) // size:
            return Miss("tail" if match.depth else "cold", at)
        if match.depth == self.reusable(lease, len(token_ids)):
            return Miss("exactness", at)
        if match.known == match.depth and self._known_elsewhere(lease, match.depth):
            return Miss("namespace", at)
        if match.blocked:
            return Miss("exactness", at)
        if match.known > match.depth or lease.digests[match.depth] in self._reclaimed:
            return Miss("reclaimed", at)
        return Miss("diverged" if match.depth else "cold", at)

    def publish(self, lease: Lease, i: int) -> Node | None:
        """The node for block `i` of `lease`, made if need be; None if the digest belongs to other content."""
        key, digest = lease.keys[i], lease.digests[i]
        parent = lease.tip or self.roots.get(lease.namespace)
        node = self.nodes.get(digest)
        if node is not None:
            if node.parent is parent and node.tokens == key:
                return node
            self.collisions += 1
            return None
        if lease.tip is not None and self.nodes.get(lease.tip.digest) is not lease.tip:
            return None
        if parent is None:
            parent = self.roots[lease.namespace] = self._new_root(lease.namespace)
        node = self.nodes[digest] = Node(parent, key, digest, self._groups)
        parent.children += 1
        if parent.parent is None:
            self._firsts.setdefault(key, {})[lease.namespace] = None
        self._reclaimed.pop(digest, None)
        return node

    def put(self, node: Node, block: Block) -> None:
        """Make the sealed `block` the one that `node` is served from in its layer group."""
        node.blocks[block.group] = block
        block.node = node

    def swap(self, old: Block, new: Block) -> None:
        """`new`, sealed and the same content, takes the place of `old`, which has no reader."""
        assert old.node is not None
        self.put(old.node, new)
        old.node = None
        new.idle_children, old.idle_children = old.idle_children, 0
        new.uses += old.uses
        new.priority = min(new.priority, old.priority)

    def drop(self, block: Block) -> None:
        """Take `block` out; nodes left with no blocks and no children go too."""
        node = block.node
        assert node is not None
        node.blocks[block.group] = None
        block.node = None
        self._reclaimed[node.digest] = None
        if len(self._reclaimed) > REMEMBERED:
            self._reclaimed.popitem(last=False)
        while node.parent is not None and not node.children and not any(node.blocks):
            del self.nodes[node.digest]
            node.parent.children -= 1
            if node.parent.parent is None:
                self._forget_first(node)
            node = node.parent

    def parent_of(self, block: Block) -> Block | None:
        """The block without which `block` cannot be found. Behind a window there is none."""
        node = block.node
        if node is None or node.parent is None or block.group in self._windowed:
            return None
        return node.parent.blocks[block.group]

    def _new_root(self, namespace: Namespace) -> Node:
        return Node(None, b"", self._hasher.root(namespace), self._groups)

    def _forget_first(self, node: Node) -> None:
        root = node.parent
        namespaces = self._firsts[node.tokens]
        namespace = next(n for n in namespaces if self.roots.get(n) is root)
        del namespaces[namespace]
        if not namespaces:
            del self._firsts[node.tokens]
        if root is not None and not root.children:
            del self.roots[namespace]

    def _walk(
        self, namespace: Namespace, digests: Sequence[bytes], keys: Sequence[bytes], limit: int
    ) -> list[Node]:
        path: list[Node] = []
        parent = self.roots.get(namespace)
        if parent is None:
            return path
        nodes = self.nodes
        for i in range(limit):
            node = nodes.get(digests[i])
            if node is None:
                break
            if node.parent is not parent or node.tokens != keys[i]:
                self.collisions += 1
                break
            path.append(node)
            parent = node
        return path

    def _depth_served(self, path: Sequence[Node], exact: bool) -> int:
        """Most nodes of `path` from the root that every layer group can serve."""
        depth = len(path)
        for g in self._full:
            for i in range(depth):
                block = path[i].blocks[g]
                if block is None or (exact and not block.exact):
                    depth = i
                    break
        if not self._windowed:
            return depth
        runs = [_runs(path[:depth], g, exact) for g in self._windowed]
        while depth and not all(
            run[depth - 1] >= depth - self.layout.first_block(g, depth * self.layout.block_size)
            for g, run in zip(self._windowed, runs, strict=True)
        ):
            depth -= 1
        return depth

    def _known_elsewhere(self, lease: Lease, depth: int) -> bool:
        """Whether another namespace holds the first `depth + 1` blocks; looks at a few namespaces only.

        Other tenants' are never looked at: neither the receipt nor its timing may tell what they have asked.
        """
        own = lease.namespace
        others = [n for n in self._firsts.get(lease.keys[0], ()) if n != own and n.tenant == own.tenant]
        for namespace in others[:FOREIGN_NAMESPACES]:
            digests, digest = [], self._hasher.root(namespace)
            for key in lease.keys[: depth + 1]:
                digest = self._hasher.chain(digest, key)
                digests.append(digest)
            if len(self._walk(namespace, digests, lease.keys, depth + 1)) > depth:
                return True
        return False


def _runs(path: Sequence[Node], g: int, exact: bool) -> list[int]:
    """For each node, how many nodes in a row up to it hold a usable block of group `g`."""
    runs, run = [], 0
    for node in path:
        block = node.blocks[g]
        run = run + 1 if block is not None and (block.exact or not exact) else 0
        runs.append(run)
    return runs
