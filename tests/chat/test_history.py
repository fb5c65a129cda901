"""Where a conversation goes on: behind the latest turn that it repeats, in that turn's branch or in a new one."""

from __future__ import annotations

from collections.abc import Sequence

from heddle_dask.chat.conversation import CalledTool, ChatMessage
from heddle_dask.chat.history import History, HistoryPlace, SampledTurn


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def said(text: str, *calls: CalledTool, thinking: str = "") -> ChatMessage:
    return ChatMessage("assistant", text, thinking, calls)


HELLO, ONE, MORE = user("hello"), said("one", thinking="hm"), user("more")


def place(history: History, *messages: ChatMessage, root: str = "") -> HistoryPlace:
    return history.place(history.path(root, messages), messages)


def sample(history: History, messages: Sequence[ChatMessage], *replies: ChatMessage, step: int = 0) -> list[int]:
    at = place(history, *messages)
    return history.answered(at, history.begin(at), replies, step)


def test_a_conversation_goes_on_behind_its_turn_and_a_second_time_in_a_new_branch() -> None:
    history = History()
    assert sample(history, [HELLO], ONE) == [0]
    at = place(history, HELLO, said(" one "), MORE)
    assert (at.turn, at.messages, at.branch) == (SampledTurn(0, 0), (MORE,), 0)
    assert history.begin(at) == 0
    again = place(history, HELLO, ONE, user("other"))
    assert (again.turn, again.branch) == (SampledTurn(0, 0), None), "its branch has gone on"
    assert history.begin(again) == 1
    assert history.forked == 1


def test_calls_are_the_same_whatever_their_text_and_ids() -> None:
    history = History()
    sample(history, [HELLO], said("", CalledTool("f", '{"a": 1, "b": [true]}', "x")))
    back = said("", CalledTool("f", '{"b":[true],"a":1}', "y"))
    assert place(history, HELLO, back, ChatMessage("tool", "r", call_id="y")).branch == 0
    other = said("", CalledTool("f", '{"a": 2, "b": [true]}', "x"))
    assert place(history, HELLO, other, MORE).turn is None


def test_other_variables_of_the_template_are_another_beginning() -> None:
    history = History()
    sample(history, [HELLO], ONE)
    assert place(history, HELLO, ONE, MORE, root="tools").turn is None


def test_of_turns_with_one_meaning_the_latest_whose_branch_is_free_goes_on() -> None:
    history = History()
    assert sample(history, [HELLO], ONE, said("one")) == [0, 1]
    assert history.begin(place(history, HELLO, ONE, MORE)) == 1
    assert history.begin(place(history, HELLO, ONE, MORE)) == 0
    assert place(history, HELLO, ONE, MORE).branch is None


def test_a_prompt_whose_step_was_given_up_is_taken_by_the_next_request_for_it() -> None:
    history = History()
    sample(history, [HELLO], ONE)
    at = place(history, HELLO, ONE, MORE)
    history.given_up(at, history.begin(at))
    assert place(history, HELLO, ONE, user("other")).branch is None, "it has other messages"
    again = place(history, HELLO, ONE, MORE)
    assert (again.branch, again.rests) == (0, True)
    assert history.begin(again) == 0
    assert place(history, HELLO, ONE, MORE).branch is None, "taken"


def test_turns_that_come_back_altered_are_counted_once_and_examples_are_not() -> None:
    history = History()
    sample(history, [HELLO, said("an example"), MORE], ONE)
    assert history.altered == 0
    for _ in range(2):
        history.begin(place(history, HELLO, said("an example"), MORE, said("on"), HELLO))
    assert history.altered == 1


def test_a_cut_turn_is_continued_and_known_with_its_rest() -> None:
    history = History()
    at = place(history, HELLO)
    history.answered(at, history.begin(at), [said("once ")], 0, [True])
    rest = place(history, HELLO, said("once "))
    assert (rest.turn, rest.messages) == (SampledTurn(0, 0, is_cut=True), ())
    history.answered(rest, history.begin(rest), [said("upon")], 1)
    assert place(history, HELLO, said("once upon"), MORE).turn == SampledTurn(0, 1)
    whole = place(history, HELLO, ONE)
    assert (whole.turn, whole.begun) == (None, ONE), "a beginning that the agent has made up"
