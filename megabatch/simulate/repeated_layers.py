"""Simulation of a deep model from two shallow ones, and of a pipeline's many microbatches from a few.

Memory is a list of steps: allocations, releases, moves between categories. The steps of the deeper model are those of
the other with blocks inserted, one wherever steps repeat with the layers. A model that is deeper still has the same
blocks more often. So its steps are written down without being run, and the allocator replays them: its fragmentation is
that of the whole model. Arithmetic and traffic are sums over layers and grow by the same amount with each.

Steps that do not repeat so are not extended: `extend` returns None, and the whole model is to be simulated.

A rank of a pipeline runs all microbatches of a call in one schedule step. `repeat_microbatches` writes down those of
more of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import ceil

from megabatch.pipeline.order import BACKWARD, FORWARD, Action, order_of_stage
from megabatch.simulate.allocator import ROUND_BYTES
from megabatch.simulate.ledger import ALLOCATE, BEGIN, FREE, MOVE, PHASE, MemoryLog, Phase, Step
from megabatch.simulate.simulated_update import INPUTS, SCHEDULE, Repetition, Simulated, read_phase

WINDOW, FEW = 64, 8  # steps to compare after a block, and after a step with other bytes
WORK = (
    "flops", "compute_seconds", "arithmetic_seconds", "host_seconds", "cpu_seconds", "copy_seconds", "awaited_seconds",
)  # fmt: skip
OPTIMIZER_PHASE = "step"
Kind = tuple[object, ...]


def extend(shallow: Simulated, deeper: Simulated, num_blocks: int) -> Simulated | None:
    """Return the simulation of a model with ``num_blocks`` times the layers that ``deeper`` has beyond ``shallow``.

    ``num_blocks`` of 0 is ``shallow``, and of 1 is ``deeper``.
    """
    tried = (_extend_steps(shallow, deeper, num_blocks, by_sum) for by_sum in (False, True))
    steps = next((extended for extended in tried if extended is not None), None)
    if steps is None or shallow.phases.keys() != deeper.phases.keys():
        return None
    log = MemoryLog(shallow.on_host, is_cpu=shallow.device.is_cpu)
    for step in steps:
        log.add(step)
    log.note_peak()
    steady_bytes = _grown(shallow.steady_bytes, deeper.steady_bytes, num_blocks)
    if abs(log.steady_bytes - steady_bytes) > steady_bytes / 1000:
        return None
    for name, phase in log.phases.items():
        _add_work(phase, shallow.phases[name], deeper.phases[name], num_blocks)
    return replace(
        deeper,
        phases=log.phases,
        where=log.peak[0],
        steady_bytes=log.steady_bytes,
        host_bytes=log.host_peak_bytes,
        num_parameters=_grown(shallow.num_parameters, deeper.num_parameters, num_blocks),
        steps=tuple(steps),
    )


def _extend_steps(shallow: Simulated, deeper: Simulated, num_blocks: int, by_sum: bool) -> list[Step] | None:
    alignment = align(shallow.steps, deeper.steps, by_sum=by_sum)
    return None if alignment is None else _Writer(deeper.steps, alignment, num_blocks).write()


def _grown(shallow: int, deeper: int, num_blocks: int) -> int:
    return shallow + num_blocks * (deeper - shallow)


def _add_work(phase: Phase, shallow: Phase, deeper: Phase, num_blocks: int) -> None:
    """Give a phase the arithmetic and the traffic of its layers."""
    for name in WORK:
        setattr(phase, name, _grown(getattr(shallow, name), getattr(deeper, name), num_blocks))
    phase.sent = {
        key: sent.times_plus(num_blocks, shallow.sent[key].times_plus(1 - num_blocks) if key in shallow.sent else None)
        for key, sent in deeper.sent.items()
    }


@dataclass
class Alignment:
    """Differences of two lists of steps, by positions in the longer one."""

    blocks: list[tuple[int, int]] = field(
        default_factory=list[tuple[int, int]]
    )  # position, length of a block that repeats
    sizes: dict[int, int] = field(
        default_factory=dict[int, int]
    )  # of a step with other bytes → bytes in the shorter list
    surplus: dict[int, list[Step]] = field(default_factory=dict[int, list[Step]])  # end of a phase → what more it keeps


def align(shorter: Sequence[Step], longer: Sequence[Step], *, by_sum: bool = False) -> Alignment | None:
    """Return what makes the longer list of the shorter one; None if it is not the same phases with repeated blocks.

    ``by_sum`` looks for no blocks in the optimizer's step, only for what more it keeps.
    """
    alignment, end = Alignment(), 0
    parts, longer_parts = _split(shorter), _split(longer)
    if len(parts) != len(longer_parts):
        return None
    for part, longer_part in zip(parts, longer_parts, strict=True):
        start, end = end, end + len(longer_part)
        is_step = [step.category for step in longer_part[:1]] == [OPTIMIZER_PHASE]
        if not (by_sum and is_step) and _align_part(part, longer_part, start, alignment):
            continue
        if not is_step:
            return None
        cut, longer_cut = _end_of_own(part), _end_of_own(longer_part)
        kept_steps = _kept_more(part[:cut], longer_part[:longer_cut])
        if kept_steps is None or not _align_part(part[cut:], longer_part[longer_cut:], start + longer_cut, alignment):
            return None
        alignment.surplus[start + longer_cut] = kept_steps
    return alignment


def _end_of_own(steps: Sequence[Step]) -> int:
    """Return the position after the last step with an allocation that is made here."""
    allocated = {step.name for step in steps if step.kind == ALLOCATE}
    return max((index + 1 for index, step in enumerate(steps) if step.name in allocated), default=0)


def _split(steps: Sequence[Step]) -> list[Sequence[Step]]:
    """Return the steps of each phase."""
    starts = [0, *(index for index, step in enumerate(steps) if step.kind == PHASE), len(steps)]
    return [steps[first:end] for first, end in pairwise(starts)]


def _align_part(shorter: Sequence[Step], longer: Sequence[Step], start: int, alignment: Alignment) -> bool:
    """Add the blocks of a part that begins at ``start`` of the longer list; False, and nothing, where they fail."""
    ids: dict[Kind, int] = {}
    short, long = ([ids.setdefault(_kind(step), len(ids)) for step in steps] for steps in (shorter, longer))
    blocks: list[tuple[int, int]] = []
    sizes: dict[int, int] = {}
    i = j = 0
    while i < len(short) or j < len(long):
        if i < len(short) and j < len(long) and short[i] == long[j]:
            i, j = i + 1, j + 1
        elif length := _block_length(short, long, i, j) or _block_before_grown(shorter, longer, i, j):
            blocks.append((start + j, length))
            j += length
        elif i < len(short) and j < len(long) and _are_alike(shorter[i : i + FEW], longer[j : j + FEW]):
            sizes[start + j] = shorter[i].num_bytes
            i, j = i + 1, j + 1
        else:
            return False
    alignment.blocks.extend(blocks)
    alignment.sizes.update(sizes)
    return True


def _are_alike(shorter: Sequence[Step], longer: Sequence[Step]) -> bool:
    """Return True for steps that differ in nothing but bytes, which grow with the layers."""
    return [_kind(step)[:-1] for step in shorter] == [_kind(step)[:-1] for step in longer]


def _kept_more(shorter: Sequence[Step], longer: Sequence[Step]) -> list[Step] | None:
    """Return the allocations that the longer list keeps beyond those of the shorter one; None if it keeps fewer.

    An optimizer that steps a few parameters at a time cuts them otherwise for each number of layers. It frees what it
    needs for that, and keeps states.
    """
    kept_longer, freed = _kept(longer)
    less, freed_less = _kept(shorter)
    kept_longer.update(freed_less)
    less.update(freed)
    return None if less - kept_longer else list((kept_longer - less).elements())


def _kept(steps: Sequence[Step]) -> tuple[Counter[Step], Counter[Step]]:
    """Return the allocations that outlive these steps, and the earlier ones that they free."""
    alive: dict[int, Step] = {}
    freed: list[Step] = []
    for step in steps:
        if step.kind == ALLOCATE:
            alive[step.name] = step
        elif step.kind == FREE and alive.pop(step.name, None) is None:
            freed.append(step)
        elif step.kind == MOVE and step.name in alive:
            alive[step.name] = alive[step.name]._replace(category=step.category)
    return _anonymous(alive.values()), _anonymous(freed)


def _anonymous(steps: Iterable[Step]) -> Counter[Step]:
    return Counter(Step(ALLOCATE, 0, step.num_bytes, step.stream, step.category) for step in steps)


def _kind(step: Step) -> Kind:
    """Return a step without the name of its allocation."""
    return step.kind, step.category, step.before, step.stream, step.num_bytes


def _block_length(short: list[int], long: list[int], i: int, j: int) -> int:
    """Return the length of the block at ``j`` that repeats the steps before it and after which both agree; or 0."""
    best = best_agreeing = 0
    for length in range(1, min(j, len(long) - j) + 1):
        at = j + length
        ends = i == len(short) and at == len(long)
        if not ends and (i == len(short) or at == len(long) or long[at] != short[i]):
            continue
        if long[j - length : j] != long[j:at]:
            continue
        agreeing = WINDOW if ends else _agreeing(short, long, i, at)
        if agreeing > best_agreeing:
            best, best_agreeing = length, agreeing
    return best


def _block_before_grown(shorter: Sequence[Step], longer: Sequence[Step], i: int, j: int) -> int:
    """Return the length of the block at ``j`` after which both agree but for bytes that grow with the layers; or 0.

    It is 0, too, where both agree as far without a block.
    """
    best, best_agreeing = 0, max(FEW - 1, _agreeing_but_grown(shorter, longer, i, j))
    for length in range(1, min(j, len(longer) - j) + 1):
        at = j + length
        agreeing = _agreeing_but_grown(shorter, longer, i, at)
        if agreeing > best_agreeing and all(map(_are_same, longer[j - length : j], longer[j:at])):
            best, best_agreeing = length, agreeing
    return best


def _are_same(first: Step, second: Step) -> bool:
    return _kind(first) == _kind(second)


def _agreeing_but_grown(shorter: Sequence[Step], longer: Sequence[Step], i: int, j: int) -> int:
    """Return how many steps agree from there on, if all bytes that grow grow alike."""
    grown: dict[int, int] = {}
    for number, (first, second) in enumerate(zip(shorter[i : i + WINDOW], longer[j : j + WINDOW], strict=False)):
        is_same = first.num_bytes == second.num_bytes
        has_grown_alike = is_same or grown.setdefault(first.num_bytes, second.num_bytes) == second.num_bytes
        if not has_grown_alike or not _are_alike([first], [second]):
            return number
    return min(WINDOW, len(shorter) - i, len(longer) - j)


def _agreeing(short: list[int], long: list[int], i: int, j: int) -> int:
    window = min(WINDOW, len(short) - i, len(long) - j)
    return next((number for number in range(window) if short[i + number] != long[j + number]), window)


@dataclass
class _Live:
    """An allocation in the list that is written."""

    name: int
    num_bytes: int
    stream: int
    category: str

    def is_like(self, step: Step) -> bool:
        """Return True if a step may name this one too."""
        before = step.before if step.kind == MOVE else step.category
        return (self.num_bytes, self.stream, self.category) == (step.num_bytes, step.stream, before)


class _Writer:
    """Writes the steps of a deep model.

    Steps at the same place of a repeated block share a site. A step that releases an allocation names it by the site of
    its allocation and by its turn among those of the site that are alive: counted from the latest (a backward releases
    what the last forward has kept) or from the earliest.
    """

    def __init__(self, steps: Sequence[Step], alignment: Alignment, num_blocks: int) -> None:
        self._steps, self._sizes, self._num_blocks = steps, alignment.sizes, num_blocks
        self._blocks, self._kept = dict(alignment.blocks), alignment.surplus
        self._sites = _sites(steps, alignment.blocks)
        self._targets = self._find_targets()
        self._live: dict[object, list[_Live]] = {}
        self._written: list[Step] = []
        self._names = 0

    def write(self) -> list[Step] | None:
        """Return the steps; None if one of them names an allocation that is not there."""
        position = 0
        while position < len(self._steps):
            length = self._blocks.get(position, 0)
            part = range(position, position + max(1, length))
            for _ in range(self._num_blocks if length else 1):
                if not all(self._write_step(index) for index in part):
                    return None
            position = part.stop
            for step in self._kept.get(position, []) * (self._num_blocks - 1):
                self._names += 1
                self._written.append(step._replace(name=self._names))
        return self._written

    def _write_step(self, index: int) -> bool:
        step = new = self._steps[index]
        if step.kind == ALLOCATE:
            self._names += 1
            bytes_once = self._sizes.get(index, step.num_bytes)
            num_bytes = ceil(_grown(bytes_once, step.num_bytes, self._num_blocks) / ROUND_BYTES) * ROUND_BYTES
            new = step._replace(name=self._names, num_bytes=num_bytes)
            self._live.setdefault(self._sites[index], []).append(
                _Live(new.name, new.num_bytes, new.stream, new.category)
            )
        elif step.kind in (FREE, MOVE):
            allocation = self._find(index)
            if allocation is None:
                return False
            category = allocation.category if step.kind == FREE else step.category
            new = Step(
                step.kind, allocation.name, allocation.num_bytes, allocation.stream, category, allocation.category
            )
            allocation.category = category
        self._written.append(new)
        return True

    def _find(self, index: int) -> _Live | None:
        """Return the allocation that a step names, or a like one; a step that releases takes it out."""
        step = self._steps[index]
        site, turn = self._targets[index]
        alive = self._live.get(site, [])
        if step.kind == MOVE:
            alive = [allocation for allocation in alive if allocation.category == step.before]
        if not -len(alive) <= turn < len(alive):
            like = [allocations for allocations in self._live.values() if allocations and allocations[-1].is_like(step)]
            if not like:
                return None
            alive = max(like, key=lambda allocations: allocations[-1].name)
            turn = len(alive) - 1
        return alive.pop(turn) if step.kind == FREE else alive[turn]

    def _find_targets(self) -> dict[int, tuple[object, int]]:
        """Return, for each step that names an allocation, that one's site and turn."""
        site_of: dict[int, object] = {}  # name of an allocation → its site
        alive: dict[object, list[int]] = {}
        categories: dict[int, str] = {}  # by name
        turns: dict[object, list[tuple[int, int, int]]] = {}  # by the site of the step: position, turn from either end
        targets: dict[int, object] = {}
        for index, step in enumerate(self._steps):
            if step.kind == ALLOCATE:
                site_of[step.name], categories[step.name] = self._sites[index], step.category
                alive.setdefault(self._sites[index], []).append(step.name)
            elif step.kind in (FREE, MOVE):
                targets[index] = site_of[step.name]
                names = alive[targets[index]]
                if step.kind == MOVE:
                    names = [name for name in names if categories[name] == step.before]
                    categories[step.name] = step.category
                turn = names.index(step.name)
                turns.setdefault(self._sites[index], []).append((index, turn, turn - len(names)))
                if step.kind == FREE:
                    names.pop(turn)
        resolved: dict[int, tuple[object, int]] = {}
        for turns_of_site in turns.values():
            from_start, from_end = ({turn[side] for turn in turns_of_site} for side in (1, 2))
            is_from_end = len(from_end) == 1 or (len(from_start) > 1 and max(from_end) == -1)
            if len(turns_of_site) == 1:
                (_, start, end), *_ = turns_of_site
                is_from_end = -end - 1 <= start
            for index, start, end in turns_of_site:
                resolved[index] = targets[index], end if is_from_end else start
        return resolved


def _sites(steps: Sequence[Step], blocks: Sequence[tuple[int, int]]) -> list[object]:
    """Return the site of each step: its place in a block that repeats, or its own position."""
    kinds = [_kind(step) for step in steps]
    sites: list[object] = list(range(len(steps)))
    last = 0
    for number, (position, length) in enumerate(blocks):
        first = position
        while first > last and kinds[first - 1] == kinds[first - 1 + length]:
            first -= 1
        last = position + length
        while last < len(kinds) and kinds[last] == kinds[last - length]:
            last += 1
        for index in range(first, last):
            sites[index] = number, (index - first) % length
    return sites


def repeat_microbatches(simulated: Simulated, num_microbatches: int) -> Simulated | None:
    """Return the simulation of more microbatches of a pipeline's rank with one stage, of which a few were run.

    The steps of a microbatch in the middle are written down again for others, between those of the first and the last.
    Returns None if a step then names memory that is not there, or if memory is left over.
    """
    repeater = _Repeater(simulated.steps, simulated.num_microbatches, num_microbatches)
    steps = repeater.write()
    if steps is None:
        return None
    log = MemoryLog(simulated.on_host)
    for step in steps:
        log.add(step)
    log.note_peak()
    for name, phase in log.phases.items():
        log.phases[name] = replace(simulated.phases[name], peak_bytes=phase.peak_bytes, at_peak=phase.at_peak)
    return replace(
        simulated,
        phases=log.phases,
        where=log.peak[0],
        steady_bytes=log.steady_bytes,
        num_microbatches=num_microbatches,
        times={name: repeater.count(name) for name in log.phases},
        steps=tuple(steps),
        repetition=repeater.repetition,
    )


Place = tuple[int, str, int]  # update, kind of action, microbatch
Mark = tuple[int, str, int, int]  # of an allocation in its segment: bytes, category, stream, turn among those alike
BUFFERS = "buffers"  # kind of the allocations of what a microbatch is going to receive


@dataclass
class _Segment:
    """The steps of an action in an update, or some between actions."""

    update: int
    action: Action | None
    steps: list[Step] = field(default_factory=list[Step])

    @property
    def place(self) -> Place:
        assert self.action is not None
        return self.update, self.action.kind, self.action.microbatch

    def marks(self) -> dict[int, Mark]:
        """Return the allocations that outlive the segment: name → mark."""
        freed = {step.name for step in self.steps if step.kind == FREE}
        moved = {step.name: step.category for step in self.steps if step.kind == MOVE}  # gradients are made once
        turns: Counter[tuple[int, str, int]] = Counter()
        marks: dict[int, Mark] = {}
        for step in self.steps:
            if step.kind == ALLOCATE and step.name not in freed:
                kind = step.num_bytes, moved.get(step.name, step.category), step.stream
                marks[step.name] = (*kind, turns[kind])
                turns[kind] += 1
        return marks


class _Repeater:
    """Writes the steps of many microbatches by those of a few."""

    def __init__(self, steps: Sequence[Step], num_run: int, num: int) -> None:
        self._segments = list(_cut_by_actions(steps, num_run))
        self._own = {segment.place: segment for segment in self._segments if segment.action is not None}
        kinds = [kind for update, kind, _ in self._own if update == 0 and kind in (FORWARD, BACKWARD)]
        early = kinds.index(BACKWARD)
        self._num_early = num if early == num_run else early  # forwards before the first backward
        self.repetition = Repetition(num_run, num, 1 if early == num_run else early)
        self._places: dict[int, tuple[Place, Mark]] = {}
        for place, segment in self._own.items():
            self._places |= {name: (place, mark) for name, mark in segment.marks().items()}
        self._names: dict[object, int] = {}  # an allocation by its place and mark, or by its name → its new name
        self._live: dict[int, Step] = {}
        self._written: list[Step] = []
        self._count = 0

    def write(self) -> list[Step] | None:
        """Return the steps; None if they do not fit together."""
        for (update, is_run), group in groupby(self._segments, lambda segment: (segment.update, _group_of(segment))):
            segments = list(group)
            if is_run is None:
                if not all(self._write_segment(segment, None) for segment in segments):
                    return None
                continue
            for action in self._actions(segments):
                simulated_segment = self._own[update, action.kind, self.repetition.simulated(action).microbatch]
                # The last action also frees what all microbatches have left.
                if not self._write_segment(simulated_segment, action, is_last=simulated_segment is segments[-1]):
                    return None
        return self._written if self._num_left() == _num_left(self._segments) else None

    def count(self, phase: str) -> int:
        """Return how often a phase runs in an update."""
        action = read_phase(phase)
        return 1 if action is None else len(self.repetition.microbatches(action))

    def _actions(self, segments: Sequence[_Segment]) -> list[Action]:
        """Return all actions of a group of segments, in order."""
        first = segments[0].action
        assert first is not None
        if first.kind in (INPUTS, BUFFERS):
            return [first._replace(microbatch=index) for index in range(self.repetition.num)]
        return list(order_of_stage(first.stage, self._num_early, self.repetition.num))

    def _write_segment(self, segment: _Segment, action: Action | None, *, is_last: bool = False) -> bool:
        marks = segment.marks() if action is not None else {}
        for step in segment.steps:
            if step.kind == ALLOCATE:
                self._count += 1
                key: object = step.name
                if action is not None and step.name in marks:
                    key = (segment.update, action.kind, action.microbatch), marks[step.name]
                self._names[key] = self._count
                new = self._live[self._count] = step._replace(name=self._count)
                self._written.append(new)
            elif step.kind in (FREE, MOVE):
                names = self._find(step.name, segment, action, is_last)
                if not names:
                    return False
                self._written += [step._replace(name=name) for name in names]
                for name in names if step.kind == FREE else ():
                    del self._live[name]
            else:
                self._written.append(step)
        return True

    def _find(self, name: int, segment: _Segment, action: Action | None, is_last: bool) -> list[int]:
        """Return what stands for an allocation and is alive.

        It is of the same microbatch, or of one as many microbatches before; else at the same end of the schedule.
        """
        if name not in self._places:
            return self._alive([name])
        place, mark = self._places[name]
        update, kind, index = place
        if action is not None and segment.action is not None and (place == segment.place or not is_last):
            near = action.microbatch + index - segment.action.microbatch
            if update == segment.update and (alive := self._alive([((update, kind, near), mark)])):
                return alive
        places = self.repetition.microbatches(Action(kind, 0, index))
        return self._alive([((update, kind, near_index), mark) for near_index in places])

    def _alive(self, keys: Sequence[object]) -> list[int]:
        return [name for key in keys if (name := self._names.get(key)) in self._live]

    def _num_left(self) -> int:
        return len(self._live) - self.repetition.num


def _num_left(segments: Sequence[_Segment]) -> int:
    """Return the allocations that are alive at the end, without the buffers of microbatches."""
    counted = [segment for segment in segments if segment.action is None or segment.action.kind != BUFFERS]
    steps = [step for segment in counted for step in segment.steps]
    return sum({ALLOCATE: 1, FREE: -1}.get(step.kind, 0) for step in steps)


def _group_of(segment: _Segment) -> bool | None:
    """Return True for a part of a stage's schedule, False for what is made for each microbatch, None for the rest."""
    return None if segment.action is None else segment.action.kind in (FORWARD, BACKWARD)


def _cut_by_actions(steps: Sequence[Step], num_run: int) -> Iterator[_Segment]:
    """Yield the steps by actions."""
    update = 0
    segment = _Segment(update, None)
    for step in steps:
        if step.kind == BEGIN:
            update += 1
        if step.kind in (PHASE, BEGIN):
            yield from _with_buffers(segment, num_run)
            segment = _Segment(update, read_phase(step.category) if step.kind == PHASE else None)
        segment.steps.append(step)
    yield segment


def _with_buffers(segment: _Segment, num_run: int) -> Iterator[_Segment]:
    """Yield a segment; of the one that makes a schedule, the allocation of each microbatch apart."""
    marks = segment.marks()
    if not (segment.steps and segment.steps[0].category == SCHEDULE and len(marks) == num_run):
        yield segment
        return
    buffers = [step for step in segment.steps if step.name in marks and step.kind == ALLOCATE]
    yield _Segment(segment.update, None, [step for step in segment.steps if step not in buffers])
    yield from (_Segment(segment.update, Action(BUFFERS, 0, index), [step]) for index, step in enumerate(buffers))
