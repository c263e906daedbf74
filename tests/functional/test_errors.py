"""Bad input gets one clear sentence that names the argument, what came and what is wanted."""

import pytest
import torch

import mgk

QUERY, KEYS, VALUE = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 2, 9, 4), torch.randn(2, 3, 9, 5)
KEY, SHIFTS = torch.randn(2, 3, 9, 4), torch.randn(3, 2, 4)
MIXTURE = {"query": QUERY, "keys": KEYS, "value": VALUE}
SHIFTED = {"query": QUERY, "key": KEY, "shifts": SHIFTS, "value": VALUE}

COMMON = [
    ({"query": [1.0]}, TypeError, r"query must be a tensor of shape \(B, H, L, D\), got list"),
    ({"query": QUERY[0]}, ValueError, r"query must have shape \(B, H, L, D\), got \(3, 7, 4\)"),
    ({"query": QUERY.long()}, TypeError, "query must have one of the dtypes float64, float32, .*got int64"),
    ({"query": QUERY[..., :3]}, ValueError, "size 3 in dimension -1"),
    ({"query": QUERY.double()}, TypeError, "must have the dtype of query"),
]
VALUES = [
    ({"value": None}, TypeError, "value must be a tensor"),
    ({"value": VALUE[:, :, :5]}, ValueError, "value must have size 9 in dimension 2"),
    ({"value": VALUE[:1]}, ValueError, "value must have size 2 in dimension 0"),
    ({"value": VALUE.double()}, TypeError, "value must have the dtype of query"),
    ({"value": VALUE.to("meta")}, ValueError, "value must be on the query's device"),
]
OPTIONS = [
    ({"log_prior": torch.zeros(2)}, ValueError, r"log_prior must have shape \(B, H, M, S\)"),
    (
        {"log_prior": torch.zeros(1, 3, 4, 1)},
        ValueError,
        r"log_prior must be broadcastable to .*\(2, 3, 2, 9\)",
    ),
    ({"log_prior": 0.5}, TypeError, "log_prior must be a tensor"),
    ({"log_prior": torch.zeros(1, 3, 2, 1).long()}, TypeError, "log_prior must have one of the dtypes"),
    ({"variance": 0.0}, ValueError, "variance must be positive and finite, got 0"),
    ({"variance": -1}, ValueError, "variance must be positive"),
    ({"variance": float("nan")}, ValueError, "variance must be positive and finite, got nan"),
    ({"variance": "big"}, TypeError, "variance must be a number or a tensor"),
    ({"variance": True}, TypeError, "variance must be a number or a tensor"),
    ({"variance": torch.ones(3, 1, 1, 1)}, ValueError, "variance must be broadcastable"),
    ({"kernel": "laplace"}, ValueError, "kernel must be one of 'gaussian', 'dot', got 'laplace'"),
    ({"e_step": "Soft"}, ValueError, "e_step must be one of 'soft', 'hard', got 'Soft'"),
    (
        {"attn_mask": torch.ones(7, 8, dtype=torch.bool)},
        ValueError,
        r"attn_mask must be broadcastable .*\(2, 3, 7, 9\)",
    ),
    ({"attn_mask": torch.ones(1, 2, 3, 7, 9)}, ValueError, "attn_mask must be broadcastable"),
    (
        {"attn_mask": torch.ones(7, 9).int()},
        TypeError,
        "attn_mask must be bool .* or an additive float, got torch.int32",
    ),
    ({"attn_mask": "causal"}, TypeError, "attn_mask must be a tensor, got str"),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
]
ATTENTION = [
    ({"dropout_p": 1.0}, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
    ({"dropout_p": -0.1}, ValueError, "dropout_p must be at least 0"),
    ({"dropout_p": "some"}, TypeError, "dropout_p must be a number, got str"),
    (
        {"backend": "gpu"},
        ValueError,
        "backend must be one of 'auto', 'reference', 'eager', 'blockwise', 'sdpa', 'cpu', 'triton', got 'gpu'",
    ),
]


def check(function, arguments, wrong, error, message):
    with pytest.raises(error, match=message):
        function(**(arguments | wrong))


@pytest.mark.parametrize(("wrong", "error", "message"), COMMON + VALUES + OPTIONS + ATTENTION)
def test_mixture_attention(wrong, error, message):
    check(mgk.mixture_attention, MIXTURE, wrong, error, message)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"keys": KEY}, ValueError, r"keys must have shape \(B, H, M, S, D\), got \(2, 3, 9, 4\)"),
        ({"keys": KEYS[:, :2]}, ValueError, "query must have a multiple of the 2 heads of keys"),
        ({"keys": KEYS[:, :, :0]}, ValueError, "keys must have at least one component"),
        ({"query": QUERY[..., :0], "keys": KEYS[..., :0]}, ValueError, "query must have at least one feature"),
    ],
)
def test_keys(wrong, error, message):
    check(mgk.mixture_attention, MIXTURE, wrong, error, message)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        *COMMON,
        *VALUES,
        *(case for case in OPTIONS if "zeros(2)" not in str(case)),
        *ATTENTION,
        ({"key": KEYS}, ValueError, r"key must have shape \(B, H, S, D\)"),
        ({"key": KEY[..., :2]}, ValueError, "key must have size 4 in dimension -1"),
        ({"shifts": SHIFTS[0]}, ValueError, r"shifts must have shape \(H, M, D\), got \(2, 4\)"),
        ({"shifts": SHIFTS[:2]}, ValueError, "shifts must have size 3 in dimension 0"),
        ({"shifts": SHIFTS[..., :3]}, ValueError, "shifts must have size 4 in dimension 2"),
        ({"shifts": SHIFTS[:, :0]}, ValueError, "shifts must have at least one component"),
        ({"kernel": "dot"}, ValueError, "shifts cancel"),
        ({"kernel": "dot", "variance": 2.0}, ValueError, "shifts cancel"),
        ({"kernel": "dot", "variance": torch.ones(2, 3, 1, 9)}, ValueError, "shifts cancel"),
        ({"log_prior": torch.zeros(2, 3)}, ValueError, "log_prior must be broadcastable"),
    ],
)
def test_shifted_mixture_attention(wrong, error, message):
    check(mgk.shifted_mixture_attention, SHIFTED, wrong, error, message)


@pytest.mark.parametrize(("wrong", "error", "message"), COMMON + OPTIONS)
@pytest.mark.parametrize("function", [mgk.mixture_weights, mgk.responsibilities, mgk.m_step])
def test_weights_responsibilities_and_m_step(function, wrong, error, message):
    check(function, {"query": QUERY, "keys": KEYS}, wrong, error, message)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"query_mask": torch.ones(2, 9, dtype=torch.bool)},
            ValueError,
            r"query_mask must have shape \(B, L\) = \(2, 7\)",
        ),
        ({"query_mask": torch.ones(2, 7)}, TypeError, "query_mask must have one of the dtypes bool"),
    ],
)
def test_query_mask(wrong, error, message):
    check(mgk.m_step, {"query": QUERY, "keys": KEYS}, wrong, error, message)


LINEAR = [
    *COMMON,
    ({"log_prior": torch.zeros(1, 3, 4, 1)}, ValueError, "log_prior must be broadcastable"),
    (
        {"feature_map": "relu"},
        ValueError,
        "feature_map must be one of 'elu', 'favor', 'dpfp' or a callable, got 'relu'",
    ),
    (
        {"key_mask": torch.ones(2, 7, dtype=torch.bool)},
        ValueError,
        r"key_mask must have shape \(B, S\) = \(2, 9\)",
    ),
    ({"key_mask": torch.ones(2, 9)}, TypeError, "key_mask must have one of the dtypes bool"),
    ({"is_causal": None}, TypeError, "is_causal must be True or False"),
]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        *LINEAR,
        *VALUES,
        (
            {"backend": "sdpa"},
            ValueError,
            "backend must be one of 'auto', 'reference', 'blockwise', 'triton', got 'sdpa'",
        ),
        ({"initial_state": torch.zeros(3)}, TypeError, "initial_state must be the state"),
        (
            {"initial_state": (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5))},
            ValueError,
            "initial_state must have shapes",
        ),
        ({"return_state": "yes"}, TypeError, "return_state must be True or False"),
    ],
)
def test_linear_mixture_attention(wrong, error, message):
    check(mgk.linear_mixture_attention, MIXTURE, wrong, error, message)


@pytest.mark.parametrize(("wrong", "error", "message"), LINEAR)
def test_linear_mixture_weights(wrong, error, message):
    check(mgk.linear_mixture_weights, {"query": QUERY, "keys": KEYS}, wrong, error, message)
