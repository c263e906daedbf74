"""The equations as loops over single numbers, written from the paper and independent of the package."""

import itertools
import math

import numpy as np


def score(q, k, log_prior, variance, kernel, e_step):
    """log(pi e) for one query, position and component (Eq. 8, 9); without the prior when hard (Eq. 12)."""
    if kernel == "gaussian":
        value = -sum((a - b) ** 2 for a, b in zip(q, k, strict=True)) / (2 * variance)
    else:
        value = sum(a * b for a, b in zip(q, k, strict=True)) / variance
    return value + (log_prior if e_step == "soft" else 0.0)


def all_scores(query, keys, log_prior, variance, kernel, e_step):
    """(B, H, L, S, M)."""
    batch, heads, mixtures, num_keys, _ = keys.shape
    out = np.empty((batch, heads, query.shape[2], num_keys, mixtures))
    for b, h, i, j, r in itertools.product(*map(range, out.shape)):
        out[b, h, i, j, r] = score(
            query[b, h, i], keys[b, h, r, j], log_prior[b, h, r, j], variance[b, h, r, j], kernel, e_step
        )
    return out


def allowed(num_queries, num_keys, mask, is_causal):
    """The pairs that take part (B, H, L, S), and what a float mask adds to their scores."""
    addend = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(float)
    addend = addend.copy()
    if is_causal:
        for i, j in itertools.product(range(num_queries), range(num_keys)):
            if j > i + num_keys - num_queries:
                addend[:, :, i, j] = -np.inf
    return addend > -np.inf, addend


def weights(query, keys, log_prior, variance, kernel, e_step, mask, is_causal):
    """A_ij (B, H, L, S)."""
    scores = all_scores(query, keys, log_prior, variance, kernel, e_step)
    batch, heads, num_queries, num_keys, _ = scores.shape
    admitted, addend = allowed(num_queries, num_keys, mask, is_causal)
    out = np.zeros(scores.shape[:4])
    for b, h, i in itertools.product(range(batch), range(heads), range(num_queries)):
        mass = []
        for j in range(num_keys):
            terms = [math.exp(s) for s in scores[b, h, i, j]]
            total = sum(terms) if e_step == "soft" else max(terms)
            mass.append(total * math.exp(addend[b, h, i, j]) if admitted[b, h, i, j] else 0.0)
        if sum(mass) > 0:
            out[b, h, i] = np.array(mass) / sum(mass)
    return out


def responsibilities(query, keys, log_prior, variance, kernel, e_step, mask, is_causal):
    """gamma (B, H, L, M, S) (Eq. 11)."""
    scores = all_scores(query, keys, log_prior, variance, kernel, e_step)
    batch, heads, num_queries, num_keys, mixtures = scores.shape
    admitted, _ = allowed(num_queries, num_keys, mask, is_causal)
    out = np.zeros((batch, heads, num_queries, mixtures, num_keys))
    for b, h, i, j in itertools.product(*map(range, scores.shape[:4])):
        if not admitted[b, h, i, j]:
            continue
        terms = [math.exp(s) for s in scores[b, h, i, j]]
        if e_step == "hard":
            out[b, h, i, terms.index(max(terms)), j] = 1.0
        elif sum(terms) > 0:
            out[b, h, i, :, j] = np.array(terms) / sum(terms)
    return out


def m_step(gamma, query, query_mask):
    """Counts, priors, means and variances (Eq. 13 with 1/D), NaN where there is no evidence."""
    batch, heads, num_queries, mixtures, num_keys = gamma.shape
    dim = query.shape[-1]
    counts = np.zeros((batch, heads, mixtures, num_keys))
    means = np.full((*counts.shape, dim), np.nan)
    variances = np.full(counts.shape, np.nan)
    for b, h, r, j in itertools.product(*map(range, counts.shape)):
        real = [i for i in range(num_queries) if query_mask[b, i]]
        counts[b, h, r, j] = sum(gamma[b, h, i, r, j] for i in real)
        if counts[b, h, r, j] > 0:
            means[b, h, r, j] = sum(gamma[b, h, i, r, j] * query[b, h, i] for i in real) / counts[b, h, r, j]
            squares = sum(
                gamma[b, h, i, r, j] * np.sum((query[b, h, i] - means[b, h, r, j]) ** 2) for i in real
            )
            variances[b, h, r, j] = max(1e-6, squares / (dim * counts[b, h, r, j]))
    with np.errstate(invalid="ignore"):
        priors = counts / counts.sum(2, keepdims=True)
    return counts, priors, means, variances


def linear_weights(query, keys, log_prior, feature_map, key_mask, is_causal):
    """A_ij of Eq. 14 (B, H, L, S) for a feature map from a vector to a vector."""
    batch, heads, mixtures, num_keys, _ = keys.shape
    num_queries = query.shape[2]
    out = np.zeros((batch, heads, num_queries, num_keys))
    for b, h, i in itertools.product(range(batch), range(heads), range(num_queries)):
        for j in range(num_keys):
            if key_mask[b, j] and (not is_causal or j <= i + num_keys - num_queries):
                out[b, h, i, j] = sum(
                    math.exp(log_prior[b, h, r, j])
                    * float(np.dot(feature_map(query[b, h, i]), feature_map(keys[b, h, r, j])))
                    for r in range(mixtures)
                )
        if out[b, h, i].sum() != 0:
            out[b, h, i] /= out[b, h, i].sum()
    return out
