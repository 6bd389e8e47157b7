import torch

from engine.experts.codec import IdentityCodec
from engine.experts.layout import ExpertLayout, LayerLayout

CPU = torch.device("cpu")


def layout_of(*dtypes: torch.dtype, rows: int = 3) -> ExpertLayout:
    """One layer per type, each with a matrix and a bias."""
    return ExpertLayout(
        tuple(
            LayerLayout.of(
                {"down_proj": torch.empty(2, rows, 5, dtype=d), "down_proj_bias": torch.empty(2, rows, dtype=d)},
                is_transposed=False,
            )
            for d in dtypes
        )
    )


def record_with(layout: ExpertLayout, layer: int, seed: int = 0) -> torch.Tensor:
    record = torch.zeros(layout.expert_bytes, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for view in layout.views(layer, record).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return record


def test_weights_of_the_compute_type_are_the_records_own_bytes() -> None:
    layout = layout_of(torch.float32)
    codec = IdentityCodec(layout, torch.float32, CPU)
    record = record_with(layout, 0)
    weights = codec.decode(0, record)
    assert set(weights) == {"down_proj", "down_proj_bias"}
    for name, view in layout.views(0, record).items():
        assert weights[name].data_ptr() == view.data_ptr()
        assert torch.equal(weights[name], view)
    assert IdentityCodec.buffer_bytes(layout, torch.float32) == 0


def test_every_bfloat16_value_is_exact_in_float32() -> None:
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    layout = ExpertLayout((LayerLayout.of({"up_proj": everything.view(1, 256, 256)}, is_transposed=False),))
    record = torch.zeros(layout.expert_bytes, dtype=torch.uint8)
    layout.views(0, record)["up_proj"].copy_(everything.view(256, 256))
    decoded = IdentityCodec(layout, torch.float32, CPU).decode(0, record)["up_proj"]
    assert decoded.dtype is torch.float32
    # A bfloat16 is the upper half of a float32.
    upper = decoded.flatten().view(torch.int32) >> 16
    is_number = ~everything.isnan()
    assert torch.equal(upper[is_number], everything[is_number].view(torch.int16).int())
    assert torch.equal(decoded.flatten().isnan(), everything.isnan())
    assert not (decoded.flatten().view(torch.int32)[is_number] & 0xFFFF).any()


def test_conversion_buffers_are_reused_between_experts_and_layers() -> None:
    layout = layout_of(torch.bfloat16, torch.bfloat16)
    codec = IdentityCodec(layout, torch.float32, CPU)
    first = codec.decode(0, record_with(layout, 0, seed=1))
    kept = {name: weight.clone() for name, weight in first.items()}
    second = codec.decode(1, record_with(layout, 1, seed=2))
    for name in first:
        assert first[name].data_ptr() == second[name].data_ptr()
        assert not torch.equal(second[name], kept[name])
        assert torch.equal(second[name], layout.views(1, record_with(layout, 1, seed=2))[name].float())
    assert IdentityCodec.buffer_bytes(layout, torch.float32) == (3 * 5 + 3) * 4


def test_only_what_differs_from_the_compute_type_is_converted() -> None:
    layout = layout_of(torch.float32, torch.bfloat16)
    codec = IdentityCodec(layout, torch.float32, CPU)
    record = record_with(layout, 0)
    assert torch.equal(codec.decode(0, record)["down_proj"], layout.views(0, record)["down_proj"])
    weights = codec.decode(1, record_with(layout, 1))
    assert all(weight.dtype is torch.float32 for weight in weights.values())


def test_layers_of_different_shapes_get_buffers_of_their_own() -> None:
    small, large = layout_of(torch.bfloat16, rows=2).layers[0], layout_of(torch.bfloat16, rows=4).layers[0]
    layout = ExpertLayout((small, large))
    codec = IdentityCodec(layout, torch.float32, CPU)
    for layer, rows in ((0, 2), (1, 4), (0, 2)):
        record = record_with(layout, layer, seed=rows)
        weights = codec.decode(layer, record)
        assert weights["down_proj"].shape == (rows, 5)
        assert torch.equal(weights["down_proj"], layout.views(layer, record)["down_proj"].float())


def test_decoding_does_not_write_to_the_record() -> None:
    layout = layout_of(torch.bfloat16)
    codec = IdentityCodec(layout, torch.float32, CPU)
    record = record_with(layout, 0)
    before = record.clone()
    codec.decode(0, record)
    assert torch.equal(record, before)
