"""Writes the golden files beside it, of transformers' models with weights by name.

    pip install -r requirements.txt && pip install -r requirements-parity.txt
    PYTHONPATH=tests/models python tests/models/pretrained/goldens/make.py

In an environment of its own: the second line takes older versions of two packages.
"""

import json

import numpy as np
import oracle
import transformers

KEPT = (
    *("model_type", "architectures", "hidden_act", "layer_norm_eps", "pad_token_id"),
    *("type_vocab_size", "embedding_size"),
    *("norm_eps", "hidden_activation", "local_attention", "global_attn_every_n_layers"),
    *oracle.SHAPE,
)

for name in oracle.MODELS:
    model, tensors = oracle.build(name)
    config = model.config.to_dict() | {"model_type": model.config.model_type}
    about = {
        "made_with": f"transformers {transformers.__version__}",
        "config": {key: config[key] for key in KEPT if key in config},
        "tensors": tensors,
        **{
            key: np.round(value, 5).tolist()
            for key, value in oracle.theirs(model).items()
        },
    }
    path = oracle.GOLDENS / f"{name}.json"
    path.write_text(json.dumps(about, separators=(",", ":")) + "\n", "utf-8")
    print(path, path.stat().st_size)
