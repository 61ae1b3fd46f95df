"""A deterministic automaton over bytes, the smallest of its language: built from an expression, walked byte
by byte. Knows no tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import SessionError
from .expression import Characters, Choice, Expression, Interrupted, Range, Repeat, Sequence_, Text, utf8

MOST_STATES = 1 << 17
MOST_EDGES = 1 << 20
MOST_NODES = 300_000  # before it is deterministic
MOST_WORK = 20_000_000  # steps from set to set: some seconds
SIMPLER = "make the schema, regex or tools simpler: fewer, shorter or less deeply nested parts"

Edge = tuple[int, int, int]
"""From a byte to a byte, both included, and the state behind."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """States from 0, where it begins; `edges` of each in the order of bytes; an answer may end in `ends`."""

    edges: tuple[tuple[Edge, ...], ...]
    ends: frozenset[int]

    def step(self, state: int, byte: int) -> int | None:
        """The state behind `byte`; None where it may not follow."""
        for low, high, target in self.edges[state]:
            if low <= byte <= high:
                return target
        return None

    def walk(self, data: bytes, state: int = 0) -> int | None:
        """The state behind all of `data`; None where it may not follow."""
        at: int | None = state
        for byte in data:
            if at is None:
                return None
            at = self.step(at, byte)
        return at

    def only(self, state: int) -> tuple[int, int] | None:
        """The one byte that must follow, and the state behind; None where there is a choice, or an end."""
        edges = self.edges[state]
        if state in self.ends or len(edges) != 1 or edges[0][0] != edges[0][1]:
            return None
        return edges[0][0], edges[0][2]

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.edges))


def built(expression: Expression) -> Automaton:
    """The smallest automaton of a language. Raises SessionError for one that is too large, or empty."""
    nodes = _Nodes()
    start = nodes.new()
    final = nodes.add(expression, start)
    moves, ends, classes = _determined(nodes, start, final)
    moves, ends = _smallest(*_trimmed(moves, ends))
    edges = tuple(tuple(_ranges(each, classes)) for each in moves)
    made = Automaton(edges, frozenset(ends))
    if made.num_edges > MOST_EDGES:
        raise SessionError(f"the grammar needs more than {MOST_EDGES} edges; {SIMPLER}")
    return made


class _Nodes:
    """Thompson's automaton: edges of byte ranges, and empty ones."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[tuple[Range, ...], int]]] = []
        self.empty: list[list[int]] = []

    def new(self) -> int:
        if len(self.edges) >= MOST_NODES:
            raise SessionError(f"the grammar is too large: more than {MOST_NODES} places; {SIMPLER}")
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, expression: Expression, start: int) -> int:
        """Lead from `start` through the expression; returns where it ends, a node without edges so far."""
        if isinstance(expression, Text):
            for byte in expression.data:
                start = self._edge(start, ((byte, byte),))
            return start
        if isinstance(expression, Characters):
            return self._characters(expression.ranges, start, self.new())
        if isinstance(expression, Sequence_):
            for part in expression.parts:
                start = self.add(part, start)
            return start
        if isinstance(expression, Choice):
            end = self.new()
            for option in expression.options:
                first = self.new()
                self.empty[start].append(first)
                self.empty[self.add(option, first)].append(end)
            return end
        if isinstance(expression, Repeat):
            return self._repeat(expression, start)
        return self._interrupted(expression, start)

    def _edge(self, start: int, ranges: tuple[Range, ...]) -> int:
        end = self.new()
        self.edges[start].append((ranges, end))
        return end

    def _characters(self, ranges: Iterable[Range], start: int, end: int) -> int:
        # Tails are shared: characters that differ in their first bytes only.
        ends: dict[tuple[Range, ...], int] = {(): end}
        first: defaultdict[int, list[Range]] = defaultdict(list)
        for head, *tail in utf8(ranges):
            for i in range(len(tail) - 1, -1, -1):
                if tuple(tail[i:]) not in ends:
                    node = self.new()
                    self.edges[node].append(((tail[i],), ends[tuple(tail[i + 1 :])]))
                    ends[tuple(tail[i:])] = node
            first[ends[tuple(tail)]].append(head)
        self.edges[start] += [(tuple(heads), node) for node, heads in first.items()]
        return end

    def _repeat(self, repeat: Repeat, start: int) -> int:
        for _ in range(repeat.least):
            start = self.add(repeat.part, start)
        end = self.new()
        if repeat.most is None:
            loop = self.new()
            self.empty[start].append(loop)
            self.empty[loop].append(end)
            first = self.new()
            self.empty[loop].append(first)
            self.empty[self.add(repeat.part, first)].append(loop)
            return end
        for _ in range(repeat.most - repeat.least):
            self.empty[start].append(end)
            first = self.new()
            self.empty[start].append(first)
            start = self.add(repeat.part, first)
        self.empty[start].append(end)
        return end

    def _interrupted(self, expression: Interrupted, start: int) -> int:
        """A node for each beginning of the mark that the text may have come to."""
        mark = expression.mark
        places = [self.new() for _ in mark]
        inside, end = self.new(), self.new()
        self.empty[start].append(places[0])
        for k, place in enumerate(places):
            self.empty[place].append(end)
            for byte in range(128):
                seen = mark[:k] + bytes([byte])
                fits = next(n for n in range(len(seen), -1, -1) if mark[:n] == seen[len(seen) - n :])
                target = inside if fits == len(mark) else places[fits]
                self.edges[place].append((((byte, byte),), target))
            self._characters([(0x80, 0xD7FF), (0xE000, 0x10FFFF)], place, places[0])
        self.empty[self.add(expression.inner, inside)].append(places[0])
        return end


Moves = list[dict[int, int]]
"""Of each state: by class of bytes the state behind."""


def _classes(nodes: _Nodes) -> tuple[list[list[int]], dict[tuple[Range, ...], tuple[int, ...]]]:
    """Bytes that no edge tells apart, as lists of bytes; and the classes of each set of ranges."""
    sets = dict.fromkeys(ranges for edges in nodes.edges for ranges, _ in edges)
    marks: list[list[int]] = [[] for _ in range(256)]
    for i, ranges in enumerate(sets):
        for low, high in ranges:
            for byte in range(low, high + 1):
                marks[byte].append(i)
    classes: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for byte, sets_with_it in enumerate(marks):
        if sets_with_it:
            classes[tuple(sets_with_it)].append(byte)
    of: list[list[int]] = [[] for _ in sets]
    for number, mark in enumerate(classes):
        for i in mark:
            of[i].append(number)
    return list(classes.values()), {ranges: tuple(of[i]) for i, ranges in enumerate(sets)}


def _determined(nodes: _Nodes, start: int, final: int) -> tuple[Moves, set[int], list[list[int]]]:
    classes, of = _classes(nodes)
    edges = [[(of[ranges], target) for ranges, target in each] for each in nodes.edges]
    closures: dict[int, frozenset[int]] = {}

    def closure(node: int) -> frozenset[int]:
        """What is reached without a byte, as far as it matters."""
        if node not in closures:
            seen, todo = {node}, [node]
            while todo:
                for other in nodes.empty[todo.pop()]:
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
            closures[node] = frozenset(n for n in seen if nodes.edges[n] or n == final)
        return closures[node]

    first = closure(start)
    numbers, todo, work = {first: 0}, deque([first]), 0
    moves: Moves = []
    ends = set()
    while todo:
        state = todo.popleft()
        if final in state:
            ends.add(len(moves))
        reached: defaultdict[int, set[int]] = defaultdict(set)
        for node in state:
            for each, target in edges[node]:
                behind = closure(target)
                work += len(each) * len(behind)
                for number in each:
                    reached[number] |= behind
        if work > MOST_WORK:
            raise SessionError(f"the grammar is too complicated to compile; {SIMPLER}")
        move = {}
        for number, targets in reached.items():
            key = frozenset(targets)
            if key not in numbers:
                numbers[key] = len(numbers)
                todo.append(key)
            move[number] = numbers[key]
        moves.append(move)
        if len(numbers) > MOST_STATES:
            raise SessionError(f"the grammar needs more than {MOST_STATES} states; {SIMPLER}")
    return moves, ends, classes


def _trimmed(moves: Moves, ends: set[int]) -> tuple[Moves, set[int]]:
    """Without states from which no end is reached."""
    before: list[list[int]] = [[] for _ in moves]
    for state, move in enumerate(moves):
        for target in move.values():
            before[target].append(state)
    good, todo = set(ends), list(ends)
    while todo:
        for state in before[todo.pop()]:
            if state not in good:
                good.add(state)
                todo.append(state)
    if 0 not in good:
        raise SessionError("nothing satisfies the grammar; change the schema, regex or tools")
    kept = sorted(good)
    number = {state: i for i, state in enumerate(kept)}
    trimmed = [{c: number[t] for c, t in moves[state].items() if t in good} for state in kept]
    return trimmed, {number[state] for state in ends}


def _smallest(moves: Moves, ends: set[int]) -> tuple[Moves, set[int]]:
    """Hopcroft's algorithm: states that no continuation tells apart become one."""
    before: list[list[tuple[int, int]]] = [[] for _ in moves]
    for state, move in enumerate(moves):
        for number, target in move.items():
            before[target].append((number, state))
    blocks = [block for block in (set(ends), set(range(len(moves))) - ends) if block]
    block_of = [0] * len(moves)
    for i, block in enumerate(blocks):
        for state in block:
            block_of[state] = i
    waiting = set(range(len(blocks)))
    while waiting:
        into: defaultdict[int, list[int]] = defaultdict(list)
        for state in blocks[waiting.pop()]:
            for number, source in before[state]:
                into[number].append(source)
        for sources in into.values():
            hits: defaultdict[int, set[int]] = defaultdict(set)
            for source in sources:
                hits[block_of[source]].add(source)
            for i, hit in hits.items():
                if len(hit) == len(blocks[i]):
                    continue
                rest = blocks[i] - hit
                blocks[i], smaller = (rest, hit) if len(hit) <= len(rest) else (hit, rest)
                for state in smaller:
                    block_of[state] = len(blocks)
                waiting.add(len(blocks))
                blocks.append(smaller)
    return _in_order(moves, ends, block_of)


def _in_order(moves: Moves, ends: set[int], block_of: Sequence[int]) -> tuple[Moves, set[int]]:
    """The blocks as states, numbered as they are reached from the first, byte by byte."""
    one: dict[int, int] = {}
    for state, block in enumerate(block_of):
        one.setdefault(block, state)
    numbers, todo = {block_of[0]: 0}, deque([block_of[0]])
    ordered: Moves = []
    while todo:
        move = {}
        for number, target in sorted(moves[one[todo.popleft()]].items()):
            block = block_of[target]
            if block not in numbers:
                numbers[block] = len(numbers)
                todo.append(block)
            move[number] = numbers[block]
        ordered.append(move)
    return ordered, {numbers[block_of[state]] for state in ends if block_of[state] in numbers}


def _ranges(move: dict[int, int], classes: Sequence[Sequence[int]]) -> Iterator[Edge]:
    pairs = sorted((byte, target) for number, target in move.items() for byte in classes[number])
    low, last, behind = None, -2, -1
    for byte, target in pairs:
        if low is not None and byte == last + 1 and target == behind:
            last = byte
            continue
        if low is not None:
            yield low, last, behind
        low, last, behind = byte, byte, target
    if low is not None:
        yield low, last, behind
