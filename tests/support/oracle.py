"""Eq. 8 to 14 in NumPy's float64, over whole arrays and from the paper alone: nothing here imports the package."""

import numpy as np


def admitted(shape, attn_mask, is_causal, window=None, segment_ids=None):
    """What masks add to the scores (B, H, L, S): 0, -inf or a float mask's number."""
    addend = np.zeros(shape)
    if attn_mask is not None:
        addend = addend + (np.where(attn_mask, 0.0, -np.inf) if attn_mask.dtype == bool else attn_mask)
    if is_causal:
        num_queries, num_keys = shape[2:]
        later = np.arange(num_keys) > np.arange(num_queries)[:, None] + num_keys - num_queries
        addend = np.where(later, -np.inf, addend)
    own = np.arange(shape[2])[:, None] + shape[3] - shape[2]  # the positions of the queries
    keys = np.arange(shape[3])
    if window is not None:
        left, right = (
            np.inf if end is None else end for end in (window if isinstance(window, tuple) else [window] * 2)
        )
        addend = np.where((keys < own - left) | (keys > own + right), -np.inf, addend)
    if segment_ids is not None:
        runs = np.cumsum(np.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0, axis=1)  # (B, S)
        is_other = runs[:, None] != runs[:, own[:, 0]][:, :, None]  # (B, L, S)
        addend = np.where(is_other[:, None], -np.inf, addend)
    return addend


def scores(query, keys, log_prior, variance, kernel, e_step):
    """log pi_jr + log e_ijr, without the prior when hard: (B, H, M, L, S)."""
    if kernel == "dot":
        value = np.einsum("bhld,bhmsd->bhmls", query, keys) / variance[:, :, :, None]
    else:
        difference = query[:, :, None, :, None] - keys[:, :, :, None]
        value = -np.square(difference).sum(-1) / (2 * variance[:, :, :, None])
    return value if e_step == "hard" else value + log_prior[:, :, :, None]


def softmax(scores, axes):
    """The softmax over some axes; 0 where every score is -inf."""
    high = scores.max(axes, keepdims=True, initial=-np.inf)
    with np.errstate(over="ignore"):
        mass = np.exp(scores - np.where(np.isfinite(high), high, 0.0))
    total = mass.sum(axes, keepdims=True)
    return np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)


def mixture(query, keys, value, log_prior, variance, kernel, e_step, attn_mask, is_causal, upstream, **ranges):
    """The output (B, H, L, E) and the gradients, by hand: ds = P (dP - sum P dP), then the chain rule of each score."""
    batch, heads, _, num_keys, _ = keys.shape
    num_queries = query.shape[2]
    addend = admitted((batch, heads, num_queries, num_keys), attn_mask, is_causal, **ranges)
    each = scores(query, keys, log_prior, variance, kernel, e_step) + addend[:, :, None]
    if e_step == "hard":
        winner = np.zeros_like(each)
        np.put_along_axis(winner, each.argmax(2, keepdims=True), 1.0, 2)
        joint = softmax(each.max(2, keepdims=True), (2, 4)) * winner
    else:
        joint = softmax(each, (2, 4))  # P_ijr
    weights = joint.sum(2)  # A_ij
    out = weights @ value
    d_weights = upstream @ value.swapaxes(-1, -2)
    ds = joint * (d_weights - (d_weights * weights).sum(-1, keepdims=True))[:, :, None]
    sigma2 = variance[:, :, :, None]
    grads = {"value": weights.swapaxes(-1, -2) @ upstream}
    if kernel == "dot":
        product = np.einsum("bhld,bhmsd->bhmls", query, keys)
        grads["query"] = np.einsum("bhmls,bhmsd->bhld", ds / sigma2, keys)
        grads["keys"] = np.einsum("bhmls,bhld->bhmsd", ds / sigma2, query)
        grads["variance"] = -(ds * product / sigma2**2).sum(3)
    else:
        difference = query[:, :, None, :, None] - keys[:, :, :, None]  # (B, H, M, L, S, D)
        pull = (ds / sigma2)[..., None] * difference
        grads["query"] = -pull.sum((2, 4))
        grads["keys"] = pull.sum(3)
        grads["variance"] = (ds * np.square(difference).sum(-1) / (2 * sigma2**2)).sum(3)
    grads["log_prior"] = np.zeros_like(log_prior) if e_step == "hard" else ds.sum(3)
    grads["attn_mask"] = ds.sum(2)
    return out, grads


def responsibilities(query, keys, log_prior, variance, kernel, e_step, attn_mask, is_causal):
    """gamma_ijr (B, H, M, L, S): the softmax over r, one-hot when hard, 0 for pairs that are excluded."""
    shape = (*query.shape[:3], keys.shape[3])
    each = scores(query, keys, log_prior, variance, kernel, e_step)
    if e_step == "hard":
        gamma = np.zeros_like(each)
        np.put_along_axis(gamma, each.argmax(2, keepdims=True), 1.0, 2)
    else:
        gamma = softmax(each, (2,))
    return gamma * (admitted(shape, attn_mask, is_causal) > -np.inf)[:, :, None]


def linear(query, keys, value, log_prior, key_mask, is_causal, segment_ids=None):
    """Eq. 14 (B, H, L, E) with phi = elu + 1."""
    phi = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))  # noqa: E731
    products = np.einsum("bhlf,bhms,bhmsf->bhls", phi(query), np.exp(log_prior), phi(keys))
    mask = None if key_mask is None else key_mask[:, None, None]
    is_seen = admitted(products.shape, mask, is_causal, None, segment_ids) > -np.inf
    products = np.where(is_seen, products, 0.0)
    total = products.sum(-1, keepdims=True)
    return np.divide(products, total, out=np.zeros_like(products), where=total > 0) @ value
