"""The smallest deterministic automaton over bytes that accepts a regular language."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...errors import SessionError
from .expression import Alternatives, Characters, CharRange, Concatenation, Expression, Literal, Repeat, utf8

MAX_STATES = 1 << 17
MAX_EDGES = 1 << 20
MAX_NODES = 300_000  # of the nondeterministic automaton
MAX_WORK = 20_000_000  # steps of the subset construction: a few seconds
SIMPLER = "make the schema, regex or tools simpler: fewer, shorter or less deeply nested parts"

Edge = tuple[int, int, int]
"""First byte, last byte (included), next state."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """States are numbers; it starts in 0. `edges` of a state are in byte order. Answers may end in `ends`."""

    edges: tuple[tuple[Edge, ...], ...]
    ends: frozenset[int]

    @property
    def num_edges(self) -> int:
        return sum(map(len, self.edges))


def build(expression: Expression) -> Automaton:
    """The smallest automaton of a language. Raises SessionError if it is too large or accepts nothing."""
    nodes = _Nodes()
    start = nodes.new()
    final = nodes.add(expression, start)
    moves, ends, classes = _determinize(nodes, start, final)
    moves, ends = _minimize(*_trim(moves, ends))
    edges = tuple(tuple(_ranges(move, classes)) for move in moves)
    automaton = Automaton(edges, frozenset(ends))
    if automaton.num_edges > MAX_EDGES:
        raise SessionError(f"the grammar needs more than {MAX_EDGES} edges; {SIMPLER}")
    return automaton


def live_states(targets: Iterable[Iterable[int]], ends: Iterable[int]) -> set[int]:
    """The states from which an end can be reached; `targets` are the next states of each state."""
    sources: defaultdict[int, list[int]] = defaultdict(list)
    for state, reached in enumerate(targets):
        for target in reached:
            sources[target].append(state)
    todo = list(ends)
    live = set(todo)
    while todo:
        for state in sources[todo.pop()]:
            if state not in live:
                live.add(state)
                todo.append(state)
    return live


class _Nodes:
    """A nondeterministic automaton by Thompson's construction: edges of byte ranges, and empty edges."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[tuple[CharRange, ...], int]]] = []
        self.empty: list[list[int]] = []

    def new(self) -> int:
        if len(self.edges) >= MAX_NODES:
            raise SessionError(f"the grammar is too large: more than {MAX_NODES} nodes; {SIMPLER}")
        self.edges.append([])
        self.empty.append([])
        return len(self.edges) - 1

    def add(self, expression: Expression, start: int) -> int:
        """Add the expression after node `start`, and return the node after it, which has no edges yet."""
        if isinstance(expression, Literal):
            for byte in expression.data:
                start = self._edge(start, ((byte, byte),))
            return start
        if isinstance(expression, Characters):
            return self._characters(expression.ranges, start, self.new())
        if isinstance(expression, Concatenation):
            for part in expression.parts:
                start = self.add(part, start)
            return start
        if isinstance(expression, Alternatives):
            end = self.new()
            for option in expression.options:
                first = self.new()
                self.empty[start].append(first)
                self.empty[self.add(option, first)].append(end)
            return end
        return self._repeat(expression, start)

    def _edge(self, start: int, ranges: tuple[CharRange, ...]) -> int:
        end = self.new()
        self.edges[start].append((ranges, end))
        return end

    def _characters(self, ranges: Iterable[CharRange], start: int, end: int) -> int:
        # Characters that differ only in their first bytes share the nodes of the others.
        ends: dict[tuple[CharRange, ...], int] = {(): end}
        first: defaultdict[int, list[CharRange]] = defaultdict(list)
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
        for _ in range(repeat.minimum):
            start = self.add(repeat.part, start)
        end = self.new()
        if repeat.maximum is None:
            loop = self.new()
            self.empty[start].append(loop)
            self.empty[loop].append(end)
            first = self.new()
            self.empty[loop].append(first)
            self.empty[self.add(repeat.part, first)].append(loop)
            return end
        for _ in range(repeat.maximum - repeat.minimum):
            self.empty[start].append(end)
            first = self.new()
            self.empty[start].append(first)
            start = self.add(repeat.part, first)
        self.empty[start].append(end)
        return end


Moves = list[dict[int, int]]
"""For each state: the next state by byte class."""


def _classes(nodes: _Nodes) -> tuple[list[list[int]], dict[tuple[CharRange, ...], tuple[int, ...]]]:
    """Classes of bytes that no edge tells apart, and the classes that each set of ranges consists of."""
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


def _determinize(nodes: _Nodes, start: int, final: int) -> tuple[Moves, set[int], list[list[int]]]:
    classes, of = _classes(nodes)
    edges = [[(of[ranges], target) for ranges, target in node] for node in nodes.edges]
    closures: dict[int, frozenset[int]] = {}

    def closure(node: int) -> frozenset[int]:
        """The nodes that empty edges reach, without nodes that have empty edges only."""
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
            for numbers_of_edge, target in edges[node]:
                targets = closure(target)
                work += len(numbers_of_edge) * len(targets)
                for number in numbers_of_edge:
                    reached[number] |= targets
        if work > MAX_WORK:
            raise SessionError(f"the grammar is too complicated to compile; {SIMPLER}")
        move = {}
        for number, nodes_reached in reached.items():
            key = frozenset(nodes_reached)
            if key not in numbers:
                numbers[key] = len(numbers)
                todo.append(key)
            move[number] = numbers[key]
        moves.append(move)
        if len(numbers) > MAX_STATES:
            raise SessionError(f"the grammar needs more than {MAX_STATES} states; {SIMPLER}")
    return moves, ends, classes


def _trim(moves: Moves, ends: set[int]) -> tuple[Moves, set[int]]:
    """Remove the states from which no end can be reached."""
    live = live_states((move.values() for move in moves), ends)
    if 0 not in live:
        raise SessionError("nothing satisfies the grammar; change the schema, regex or tools")
    number = {state: i for i, state in enumerate(sorted(live))}
    trimmed = [{c: number[t] for c, t in moves[state].items() if t in live} for state in number]
    return trimmed, {number[state] for state in ends}


def _minimize(moves: Moves, ends: set[int]) -> tuple[Moves, set[int]]:
    """Hopcroft's algorithm: merge states that no continuation tells apart."""
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
    return _renumber(moves, ends, block_of)


def _renumber(moves: Moves, ends: set[int], block_of: Sequence[int]) -> tuple[Moves, set[int]]:
    """The blocks as states, numbered in the order in which a breadth-first walk reaches them."""
    member: dict[int, int] = {}
    for state, block in enumerate(block_of):
        member.setdefault(block, state)
    numbers, todo = {block_of[0]: 0}, deque([block_of[0]])
    ordered: Moves = []
    while todo:
        move = {}
        for number, target in sorted(moves[member[todo.popleft()]].items()):
            block = block_of[target]
            if block not in numbers:
                numbers[block] = len(numbers)
                todo.append(block)
            move[number] = numbers[block]
        ordered.append(move)
    return ordered, {numbers[block_of[state]] for state in ends if block_of[state] in numbers}


def _ranges(move: dict[int, int], classes: Sequence[Sequence[int]]) -> Iterator[Edge]:
    pairs = sorted((byte, target) for number, target in move.items() for byte in classes[number])
    start = 0
    for i, (byte, target) in enumerate(pairs):
        if pairs[i + 1 : i + 2] != [(byte + 1, target)]:
            yield pairs[start][0], byte, target
            start = i + 1
