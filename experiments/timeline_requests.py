"""Which requests run in a forward: a track for each place in the batch, where requests enclose blocks and iterations."""

from __future__ import annotations

from typing import NamedTuple

from experiments.timeline_packets import TraceWriter


class Part(NamedTuple):
    """What a forward does for one request."""

    request: int
    block: int  # -1 in prefill
    iteration: int
    num_accepted: int


class RequestTracks:
    """Draws each request on the first track that is free, so that requests of a batch never share one.

    A request that sits out a forward is drawn in two pieces.
    """

    def __init__(self, writer: TraceWriter, parent: int, rank: int) -> None:
        self._writer, self._parent, self._rank = writer, parent, rank
        self._tracks: list[int] = []
        self._running: dict[int, Part] = {}  # by number of the track, what its last forward did

    def add(self, parts: list[Part], start_ns: int, end_ns: int) -> None:
        """The next forward, with its requests."""
        wanted = {part.request: part for part in parts}
        for place, last in list(self._running.items()):
            part = wanted.get(last.request)
            if part is None:
                self._end(place, 2, start_ns)
                del self._running[place]
            elif part.block != last.block:
                self._end(place, 1, start_ns)
        places = {last.request: place for place, last in self._running.items()}
        for part in parts:
            place = places[part.request] if part.request in places else self._free_place()
            last = self._running.get(place)
            begin, track = self._writer.begin, self._tracks[place]
            if last is None:
                begin(track, start_ns, f"request {part.request}", {"request": part.request})
            if last is None or part.block != last.block:
                begin(track, start_ns, "prefill" if part.block < 0 else f"block {part.block}", {"block": part.block})
            begin(track, start_ns, f"iteration {part.iteration}", {"accepted": part.num_accepted})
            self._writer.end(track, end_ns)
            self._running[place] = part

    def finish(self, end_ns: int) -> None:
        """No forward follows."""
        for place in self._running:
            self._end(place, 2, end_ns)
        self._running.clear()

    def _end(self, place: int, num_slices: int, time_ns: int) -> None:
        for _ in range(num_slices):
            self._writer.end(self._tracks[place], time_ns)

    def _free_place(self) -> int:
        place = next(number for number in range(len(self._running) + 1) if number not in self._running)
        if place == len(self._tracks):
            name = "requests" if place == 0 else f"requests ({place + 1})"
            self._tracks.append(self._writer.track(name, self._parent, self._rank))
        return place
