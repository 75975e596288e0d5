"""Whether it pays to ask a proposer that delays the step. Pure arithmetic on measured means."""

_SMOOTHING = 0.1  # weight of the newest value
_RELAXING = 0.01  # weight per step of rest with which the gain drifts back to the prior, so that it is tried again
_PRIOR_TOKENS = 1.0  # tokens that a row is expected to gain per step


class ProposerWorth:
    """Compares the tokens that a proposer adds to the text with what else its time would bring."""

    def __init__(self) -> None:
        self._gained = _PRIOR_TOKENS  # accepted tokens per row and step that nothing else had proposed
        self._committed = 1.0  # tokens per row and step
        self._seconds = 0.0  # of one call

    def note_cost(self, seconds: float) -> None:
        """Learn from the time of a call."""
        self._seconds += _SMOOTHING * (seconds - self._seconds)

    def note_verdict(self, accepted: int, committed: int) -> None:
        """Learn from a row's step with its drafts. accepted: of its tokens. committed: of all."""
        self._gained += _SMOOTHING * (accepted - self._gained)
        self._committed += _SMOOTHING * (committed - self._committed)

    def note_rest(self) -> None:
        """Count a step without a call."""
        self._gained += _RELAXING * (_PRIOR_TOKENS - self._gained)

    def pays(self, step_s: float) -> bool:
        """Whether steps with its drafts commit more tokens per second. step_s: seconds of a step without the call."""
        without = max(self._committed - self._gained, 1.0)
        return (without + self._gained) / (step_s + self._seconds) > without / step_s
