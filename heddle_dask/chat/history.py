"""Which sampled turn a conversation goes on from, if an agent sends all of it with each request.

Agents keep the conversation and send it whole. What was sampled of it is known here by what it means
(`ChatMessage.meaning`): a request goes on behind the latest sampled turn whose whole history it repeats, and only the
messages behind that turn are new. A history that was edited, compacted or branched repeats less, so it goes on from an
earlier turn, or from the beginning. A turn that comes back with another meaning is not known: its text is rendered as
any other message, and counted.

A branch of tokens goes on behind a turn only once; a second continuation needs a fork. A branch whose step was given up
rests at its prompt, and takes the next request for that prompt.

Pure: the caller says what was asked, what was sampled, and what was given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from heddle_dask.chat.conversation import ChatMessage

_DIGEST_BYTES = 16
HistoryPath = tuple[bytes, ...]
"""Names of the beginnings of a conversation: of none of its messages, the first, the first two, and so on."""


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A turn that was sampled.

    Attributes
    ----------
    branch
        Number of the branch of tokens that ends, or once ended, with it.
    step_index
        Number of its step in the conversation, from 0.
    is_cut
        Whether its limit of tokens has ended it: as the last message of a request it is continued.
    """

    branch: int
    step_index: int
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class HistoryPlace:
    """Where a request goes on.

    Attributes
    ----------
    turn
        The sampled turn that it goes on from; None: from the beginning.
    messages
        Those behind that turn: what is to be rendered.
    branch
        The branch that takes it without a fork: the turn's own, or one that rests at this very prompt; None: a new
        branch is needed.
    rests
        Whether that branch has the messages already: its step was given up.
    path
        What `History.path` gives of the conversation.
    begun
        The last message, where it is the beginning of the reply.
    """

    turn: SampledTurn | None
    messages: tuple[ChatMessage, ...]
    branch: int | None
    rests: bool
    path: HistoryPath
    begun: ChatMessage | None

    @property
    def prompt(self) -> bytes:
        """Names the whole conversation."""
        return self.path[-1]


@dataclass(slots=True)
class _Branch:
    """Where a branch of tokens ends.

    Attributes
    ----------
    turn
        The turn that it ends with; None while a step runs, and behind one that was given up.
    prompt
        The prompt at which it rests, where its step was given up.
    known
        Number of messages of that prompt that were known when it was rendered.
    """

    turn: SampledTurn | None = None
    prompt: bytes | None = None
    known: int = 0


@dataclass(slots=True)
class History:
    """All that was sampled of the conversations of one trajectory.

    Attributes
    ----------
    altered
        Number of turns that came back with another meaning than the one sampled there.
    forked
        Number of requests that needed a new branch.
    """

    altered: int = 0
    forked: int = 0
    _turns: dict[bytes, list[SampledTurn]] = field(default_factory=dict)  # by the conversation that ends with them
    _asked: set[bytes] = field(default_factory=set)  # prompts for which a turn was sampled
    _altered: set[bytes] = field(default_factory=set)
    _branches: list[_Branch] = field(default_factory=list)
    _resting: dict[bytes, list[int]] = field(default_factory=dict)  # branches by the prompt at which they rest
    _digests: dict[ChatMessage, bytes] = field(default_factory=dict)

    def path(self, root: str, messages: Sequence[ChatMessage]) -> HistoryPath:
        """Names of the beginnings of a conversation; equal for those that mean the same.

        Parameters
        ----------
        root
            Names the variables of the template, tools included: the opening of a conversation shows them.
        """
        path = [blake2b(root.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()]
        for message in messages:
            path.append(self._next(path[-1], message))
        return tuple(path)

    def place(self, path: HistoryPath, messages: Sequence[ChatMessage]) -> HistoryPlace:
        """Where a request with these messages, at least one, and their path goes on; changes nothing."""
        begun = messages[-1] if messages[-1].role == "assistant" else None
        place = HistoryPlace(None, tuple(messages), None, False, path, begun)
        resting, rendered = self._resting.get(path[-1]), 0
        if resting:
            place, rendered = replace(place, branch=resting[0], rests=True), self._branches[resting[0]].known
        for count in range(len(messages), rendered, -1):
            turns = self._turns.get(path[count], []) if messages[count - 1].role == "assistant" else []
            if count == len(messages):
                turns = [turn for turn in turns if turn.is_cut]
            if turns:
                # Of several with one meaning, the latest whose branch can go on without a fork.
                free = [turn for turn in turns if self._branches[turn.branch].turn == turn]
                turn = (free or turns)[-1]
                branch = turn.branch if free else None
                return HistoryPlace(turn, place.messages[count:], branch, False, path, begun)
        return place

    def begin(self, place: HistoryPlace) -> int:
        """A step begins there; the number of its branch, which is a new one where the place has none."""
        self._count_altered(place)
        number = place.branch
        if number is None:
            number = self._new_branch()
            self.forked += number > 0
        branch = self._branches[number]
        if branch.prompt is not None:
            self._resting[branch.prompt].remove(number)
        branch.turn = branch.prompt = None
        return number

    def answered(
        self,
        place: HistoryPlace,
        branch: int,
        replies: Sequence[ChatMessage],
        step_index: int,
        cut: Sequence[bool] = (),
    ) -> list[int]:
        """The step of a branch has sampled these turns side by side; the branch of each, of which later ones are new.

        Parameters
        ----------
        cut
            Of each turn, whether its limit of tokens has ended it; empty: none.
        """
        self._asked.add(place.prompt)
        branches = [branch, *(self._new_branch() for _ in replies[1:])]
        for number, reply, is_cut in zip(branches, replies, cut or [False] * len(replies), strict=True):
            turn = SampledTurn(number, step_index, is_cut)
            self._branches[number].turn = turn
            self._turns.setdefault(self._next(place.prompt, reply), []).append(turn)
            if place.begun is not None:
                # Agents send the beginning that they gave and the rest of the reply as one message.
                whole = replace(reply, content=place.begun.content + reply.content)
                self._turns.setdefault(self._next(place.path[-2], whole), []).append(turn)
        return branches

    def given_up(self, place: HistoryPlace, branch: int) -> None:
        """The step of a branch has ended without a turn; the branch has the messages of its prompt."""
        if not place.rests:
            self._branches[branch].known = len(place.path) - 1 - len(place.messages)
        self._branches[branch].prompt = place.prompt
        self._resting.setdefault(place.prompt, []).append(branch)

    def _new_branch(self) -> int:
        self._branches.append(_Branch())
        return len(self._branches) - 1

    def _count_altered(self, place: HistoryPlace) -> None:
        """Count assistant messages that are rendered where another turn was sampled, each once."""
        if place.rests:
            return
        known = len(place.path) - 1 - len(place.messages)
        # The last one is none of them: where it is an assistant's, the reply continues it.
        for number, message in enumerate(place.messages[:-1], start=known):
            if message.role == "assistant" and place.path[number] in self._asked:
                self._altered.add(place.path[number + 1])
        self.altered = len(self._altered)

    def _next(self, before: bytes, message: ChatMessage) -> bytes:
        own = self._digests.get(message)
        if own is None:
            # Arguments of calls are parsed for it: once for each message, which agents send again and again.
            text = repr(message.meaning).encode("utf-8", "surrogatepass")
            own = self._digests[message] = blake2b(text, digest_size=_DIGEST_BYTES).digest()
        return blake2b(before + own, digest_size=_DIGEST_BYTES).digest()
