"""The bytes of the engine protocol, both forms of answer, and what is made of broken ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from heddle_dask.core.errors import BadInput
from heddle_dask.core.sampling import StructuredOutput
from heddle_dask.engines import wire
from heddle_dask.engines.contract import (
    VERSION_UNKNOWN,
    EngineRefused,
    EngineUnreachable,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)

FIRST = (
    b'data: {"request_id":"generate-tokens-x","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":[5],"weight_versions":null,"logprobs":'
    b'{"content":[{"token_id":5,"logprob":-0.5,"rank":1,"top_logprobs":[]}]}}]}\n\n'
)
LAST = (
    b'data: {"request_id":"generate-tokens-x","choices":[{"index":0,"finish_reason":"length",'
    b'"token_ids":[6,7],"weight_versions":[{"version":"default","start":0,"end":2},'
    b'{"version":"4","start":2,"end":3}],"logprobs":{"content":[{"token_id":6,"logprob":-1.5},'
    b'{"token_id":7,"logprob":1e-9}]}}]}\n\n'
)
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,"total_tokens":43,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


def test_a_stream_is_put_together():
    result = wire.result_of_stream(FIRST + LAST + USAGE + DONE, 0.25, 1.5)
    assert result.token_ids == (5, 6, 7)
    assert result.logprobs == (-0.5, -1.5, 0.0)
    assert result.finish_reason == "length"
    assert result.cached_tokens == 32
    assert result.policy_version == 0
    assert result.version_spans == (VersionSpan(0, 0, 2), VersionSpan(4, 2, 3))
    assert math.isnan(result.queue_s)
    assert (result.prefill_s, result.decode_s) == (0.25, 1.5)


def test_an_abort_before_the_first_token_has_no_times_and_no_version():
    body = b'data: {"choices":[{"finish_reason":"abort","token_ids":[],"weight_versions":[]}]}\n\n'
    result = wire.result_of_stream(body + DONE, 0.25, 1.5)
    assert result.token_ids == result.logprobs == result.version_spans == ()
    assert result.policy_version == VERSION_UNKNOWN
    assert math.isnan(result.prefill_s) and math.isnan(result.decode_s)


def test_a_json_answer_states_its_own_times():
    answer = json.loads(LAST[6:])
    answer["metrics"] = {
        "queue_time_ms": 10,
        "time_to_first_token_ms": 20.5,
        "generation_time_ms": None,
    }
    result = wire.result_of_json(json.dumps(answer).encode())
    assert (result.queue_s, result.prefill_s) == (0.01, 0.0205)
    assert math.isnan(result.decode_s)


@pytest.mark.parametrize(
    "body",
    [
        FIRST,
        FIRST + DONE,
        b"",
        FIRST + LAST[:-40],
        FIRST.replace(b'"logprob":-0.5', b'"logprob":-0.5').replace(b"[5]", b"[5,6]") + LAST,
        b'data: {"error":{"message":"engine core died","type":"x","code":500}}\n\n' + DONE,
        b'data: {"error":"odd"}\n\n',
        b"data: []\n\n",
    ],
)
def test_a_broken_answer_is_no_result(body):
    with pytest.raises(EngineUnreachable):
        wire.result_of_stream(body, 0.0, 0.0)


def test_a_streamed_refusal_is_a_refusal():
    body = b'data: {"error":{"message":"too hot","type":"BadRequestError","code":400}}\n\n'
    with pytest.raises(EngineRefused, match="too hot"):
        wire.result_of_stream(body, 0.0, 0.0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"too\\nlong","code":400}}', "too long"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"msg":"x"}]}', '[{"msg": "x"}]'),
        (b"<html>oops</html>", "<html>oops</html>"),
    ],
)
def test_an_engines_words_come_out_on_one_line(body, message):
    assert wire.error_message(body) == message


def test_a_request_asks_for_what_the_contract_promises():
    sampling = SamplingParams(9, 0.5, 0.9, seed=3, stop_token_ids=(7,))
    request = GenerateRequest("x", np.array([1, 2], dtype=np.int32), sampling, priority=-4)
    body = json.loads(wire.generate_body(request))
    assert body["request_id"] == "x"
    assert body["token_ids"] == [1, 2]
    assert body["priority"] == -4
    params = body["sampling_params"]
    assert params["max_tokens"] == 9
    assert (params["temperature"], params["top_p"], params["seed"]) == (0.5, 0.9, 3)
    assert params["logprobs"] == 0
    assert params["stop_token_ids"] == [7]
    plain = json.loads(wire.generate_body(GenerateRequest("x", [1], SamplingParams(9))))
    assert "seed" not in plain["sampling_params"]


@pytest.mark.parametrize(
    ("asked", "params"),
    [
        ({"top_k": 5, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1, "detokenize": False}),
        ({"stop": ("a", "b")}, {"stop": ["a", "b"], "detokenize": True, "skip_special_tokens": False}),
        (
            {"structured": StructuredOutput(json_schema={"type": "object"})},
            {"structured_outputs": {"json": '{"type": "object"}'}},
        ),
        ({"structured": StructuredOutput(regex="[0-9]+")}, {"structured_outputs": {"regex": "[0-9]+"}}),
        ({"structured": StructuredOutput(choice=["a", "b"])}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ],
)
def test_what_a_program_may_ask_for_reaches_vllm_under_its_names(asked, params):
    body = json.loads(wire.generate_body(GenerateRequest("x", [1], SamplingParams(9, **asked))))
    assert {name: body["sampling_params"].get(name) for name in params} == params
    plain = json.loads(wire.generate_body(GenerateRequest("x", [1], SamplingParams(9))))["sampling_params"]
    assert not {"top_k", "min_p", "stop", "structured_outputs"} & set(plain)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [1]},
        {"regex": 3},
        {"json_schema": "{"},
        {"json_schema": [1]},
    ],
)
def test_a_form_that_no_engine_knows_is_refused(form):
    with pytest.raises(BadInput, match="structured: ") as refused:
        StructuredOutput(**form)
    assert "\n" not in str(refused.value)


def test_an_abort_uses_the_engines_form_of_the_id():
    assert json.loads(wire.abort_body(["a", "b"])) == {"request_ids": ["generate-tokens-a", "generate-tokens-b"]}


def test_progress_is_read_from_prometheus_text():
    text = (
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.\n"
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="m"} 42.0\n'
        'vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e+09\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.125\n'
        'vllm:request_generation_tokens_sum{engine="0",model_name="m"} 40.0\n'
    )
    assert wire.progress_of_answer(text.encode()) == (42.0, 0.125)
    assert wire.progress_of_answer(b"") == ()
