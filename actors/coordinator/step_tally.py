"""How many tokens each step of a target computed and wrote for this coordinator, as its commits arrive."""

from collections.abc import Callable

from actors.coordinator.request import Request


class StepTally:
    """The steps whose commits came in one turn. A step commits to a request once."""

    def __init__(self, record: Callable[[str, int], None] | None) -> None:
        """record: called with the endpoint and the tokens of each step; None: nobody wants to know."""
        self._record = record
        self._steps: dict[tuple[str, str], dict[int, int]] = {}  # tokens by request, by target and endpoint

    def add(self, target: str, request: Request, tokens: int, *, is_first: bool) -> None:
        """Count the tokens that a step committed to a request. is_first: its first, for which the prompt was read."""
        if self._record is None:
            return
        key = target, request.endpoint.name
        step = self._steps.setdefault(key, {})
        if request.request_id in step:
            self._end(key)
            step = self._steps[key] = {}
        step[request.request_id] = tokens + (len(request.prompt) if is_first else 0)

    def flush(self) -> None:
        """Record the steps that are left."""
        for key in list(self._steps):
            self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        assert self._record is not None
        self._record(key[1], sum(self._steps.pop(key).values()))
