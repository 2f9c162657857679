"""Write tests/data/pickled: a checkpoint of PyTorch with several types and layouts, and its values.

Run it with torch:

    python tests/parity/make_pickled_fixture.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parents[1] / "data" / "pickled"

if __name__ == "__main__":
    generator = torch.Generator().manual_seed(11)
    whole = torch.randn(6, 10, generator=generator)
    module = torch.nn.Linear(3, 5)
    tensors = {
        "float32": whole,
        "rows_of_it": whole[2:4],
        "columns_of_it": whole[:, 3:7],
        "transposed": whole.t(),
        "one_row_repeated": whole[1].expand(4, 10),
        "bfloat16": whole.bfloat16(),
        "float16": whole.half(),
        "float64": whole.double(),
        "one_value": torch.tensor(2.5),
        "without_values": torch.empty(0, 4),
        "parameter": module.weight,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "config.json").write_text('{"model_type": "llama"}\n')
    torch.save(tensors, FOLDER / "pytorch_model.bin")
    np.savez_compressed(FOLDER / "expected.npz", **{k: v.detach().float().numpy() for k, v in tensors.items()})
