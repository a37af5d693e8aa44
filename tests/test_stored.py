"""State dicts and the files that hold them."""

import json
import struct
from collections import OrderedDict

import pytest
import torch
from torch import nn

from comhe import stored


def read(weights, include=None, exclude=None, columns=()):
    found, skipped = stored.neurons(weights, include, exclude, columns)
    return {name: read() for name, read in found.items()}, dict(skipped)


def write_safetensors(path, entries, metadata=None):
    """`entries`: name -> (type as the format names it, tensor); written from the format's description."""
    header, data = {}, b""
    for name, (kind, tensor) in entries.items():
        raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_rows_of_matrices_and_nothing_else():
    weights = {
        "conv.weight": torch.randn(4, 3, 2, 2),
        "conv.bias": torch.randn(4),
        "norm.running_mean": torch.randn(4),
        "codes": torch.zeros(4, 4, dtype=torch.int8),
        "phases": torch.zeros(4, 4, dtype=torch.complex64),
        "elsewhere.weight": torch.zeros(4, 4, device="meta"),
        "epoch": 3,
        "table": nn.Parameter(torch.randn(5, 2)),
    }
    found, skipped = read(weights)
    assert list(found) == ["conv", "table"]
    assert torch.equal(found["conv"], weights["conv.weight"].flatten(1))
    assert torch.equal(found["table"], weights["table"])
    assert not found["table"].requires_grad
    assert skipped == {
        "codes": "quantised or integer (torch.int8)",
        "phases": "complex (torch.complex64)",
        "elsewhere": "on the meta device and has no values",
        "epoch": "not a tensor (int)",
    }


def test_columns():
    weight = torch.randn(3, 5)
    found, _ = read({"gc1.weight": weight, "fc.weight": weight.clone()}, columns=("gc*",))
    assert torch.equal(found["gc1"], weight.T)
    assert torch.equal(found["fc"], weight)


def test_selection():
    weights = {f"{name}.weight": torch.randn(3, 3) for name in ("a.0", "a.1", "b")}
    assert list(read(weights, include="a.*")[0]) == ["a.0", "a.1"]
    assert list(read(weights, include=["b", "a.1.weight"])[0]) == ["a.1", "b"]
    found, skipped = read(weights, exclude="a.0")
    assert list(found) == ["a.1", "b"]
    assert skipped == {"a.0": "excluded"}
    with pytest.raises(ValueError, match=r"no layer 'c'.*Choose one of: .*b"):
        read(weights, include="c")
    with pytest.raises(ValueError, match="select by globs on names"):
        read(weights, include=nn.Linear)
    with pytest.raises(ValueError, match="epoch was asked for by name but is not a tensor"):
        read({"epoch": 3}, include="epoch")


def test_names_are_free_of_prefixes_of_wrappers():
    weight = torch.randn(3, 3)
    for key in ("module.fc.weight", "_orig_mod.module.fc.weight", "module._orig_mod.fc.weight"):
        assert list(read({key: weight, "epoch": 3})[0]) == ["fc"]
    assert list(read({"module.fc.weight": weight, "head.weight": weight.clone()})[0]) == ["module.fc", "head"]


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    found, skipped = read(model.state_dict())
    assert list(found) == ["0"]
    assert skipped == {"1": "tied to 0, which counts once"}
    assert list(read(model.state_dict(), include="1")[0]) == ["1"]
    assert read(model.state_dict(), exclude="0")[1] == {"0": "excluded", "1": "tied to 0, which is excluded"}


@pytest.mark.parametrize("wrap", [lambda w: w, lambda w: {"epoch": 3, "state_dict": w}, lambda w: {"model": w}])
def test_files_of_torch(tmp_path, wrap):
    weights = OrderedDict({"fc.weight": torch.randn(3, 4)})
    torch.save(wrap(weights), tmp_path / "model.pt")
    found, _ = read(stored.load(tmp_path / "model.pt"))
    assert torch.equal(found["fc"], weights["fc.weight"])


def test_files_that_hold_more_than_weights_are_not_opened(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt holds more than weights: save model\.state_dict\(\)"):
        stored.load(tmp_path / "model.pt")
    torch.save([torch.ones(2, 2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt holds a list"):
        stored.load(tmp_path / "list.pt")
    with pytest.raises(FileNotFoundError):
        stored.load(tmp_path / "nothing.pt")
    with pytest.raises(FileNotFoundError):
        stored.load(tmp_path / "nothing.safetensors")


def test_safetensors_of_every_type(tmp_path):
    values = torch.randn(3, 4)
    entries = {kind: (kind, values.to(dtype)) for kind, dtype in stored._DTYPES.items()}
    write_safetensors(tmp_path / "m.safetensors", entries, {"format": "pt"})
    found = stored.load(tmp_path / "m.safetensors")
    assert set(found) == set(entries)
    for kind, (_, tensor) in entries.items():
        assert found[kind].dtype == tensor.dtype
        assert torch.equal(found[kind].float(), tensor.float())
    assert set(read(found)[0]) == {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}


def test_safetensors_of_a_type_unknown_are_skipped(tmp_path):
    entries = {"a": ("F4", torch.zeros(2, 2, dtype=torch.uint8)), "b": ("F32", torch.ones(2, 2))}
    entries["empty"] = ("F32", torch.ones(0, 2))
    write_safetensors(tmp_path / "m.safetensors", entries)
    found, skipped = read(stored.load(tmp_path / "m.safetensors"))
    assert skipped == {"a": "not a tensor (F4)"}
    assert torch.equal(found["b"], torch.ones(2, 2))
    assert found["empty"].shape == (0, 2)


def test_damaged_safetensors_are_named(tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a": ("F32", torch.ones(8, 8))})
    whole = path.read_bytes()
    for damaged in (b"", b"\x01", whole[:40], whole[:-4], b"x" * 64, whole.replace(b"[0, 256]", b"[0, 999]")):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"m\.safetensors is damaged or no safetensors file"):
            stored.load(path)
