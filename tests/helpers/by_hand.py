"""Layers of a transformer written out in numpy, head by head, as an oracle."""

import numpy as np


def normalise(x, params, epsilon=1e-12):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * params["scale"] + params["bias"]


def attention(x, memory, mask, params, output):
    """What tokens x [length, width] read of a memory [tokens, its width] where its mask
    [tokens] is set; params: of query, key and value; output: of the projection that
    joins the heads."""
    total = output["bias"]
    for head in range(len(output["kernel"])):
        query, key, value = (
            given @ params[name]["kernel"][:, head] + params[name]["bias"][head]
            for name, given in (("query", x), ("key", memory), ("value", memory))
        )
        scores = query @ key.T / np.sqrt(query.shape[-1])
        scores = np.where(mask[None, :], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        total = total + weights @ value @ output["kernel"][head]
    return total
