"""Loads a checkpoint by torch.distributed.checkpoint, compares it bit by bit with the shards that it was
made of, and saves it by torch.distributed.checkpoint.

    dcp.py FOLDER CHECKPOINT SAVED
"""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
folder, checkpoint, saved = sys.argv[1:]

# As somebody who knows only the folder.
metadata = dcp.FileSystemReader(folder).read_metadata()
states = {
    name: torch.empty(m.size, dtype=m.properties.dtype)
    for name, m in metadata.state_dict_metadata.items()
}
dcp.load(states, checkpoint_id=folder, no_dist=True)

manifest = json.loads((Path(checkpoint) / "manifest.json").read_text())
assert set(states) == set(manifest["states"]) | {"meshwright.step"}, set(states)
assert states["meshwright.step"].item() == manifest["origin"]["step"]


def parts_of(file):
    """The tensors of a safetensors file, by name."""
    data = (Path(checkpoint) / file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    parts = {}
    for name, about in header.items():
        begin, end = (8 + length + n for n in about["data_offsets"])
        values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
        parts[name] = values.reshape(about["shape"])
    return parts


files = {name: parts_of(name) for name in manifest["files"]}
compared = 0
for name, state in manifest["states"].items():
    assert list(states[name].shape) == state["shape"], name
    for part in state["parts"]:
        at = tuple(slice(a, a + n) for a, n in zip(part["start"], part["shape"]))
        ours, theirs = files[part["file"]][name], states[name][at]
        assert torch.equal(ours.view(torch.int32), theirs.contiguous().view(torch.int32)), name
        compared += ours.numel()
assert compared == sum(s.numel() for s in states.values()) - 1

# A tensor that is no state and an object, which a plan knows nothing of.
dcp.save({**states, "epoch": torch.tensor(3), "notes": {1, 2}}, checkpoint_id=saved, no_dist=True)
# The other tool of PyTorch that takes such a folder.
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

dcp_to_torch_save(folder, f"{saved}.pt")
whole = torch.load(f"{saved}.pt", weights_only=True)
assert set(whole) == set(states), set(whole) ^ set(states)
assert all(torch.equal(whole[n], t) for n, t in states.items())
