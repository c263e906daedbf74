import numpy as np
import pytest
import torch

from mgk.analysis.attention_maps import AttentionMaps, attention_maps, attention_spread, draw_grid, map_png
from mgk.models import MgkConfig, MgkForCausalLM, MgkForDocumentRetrieval, MgkForSequenceClassification

SMALL = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8}


@pytest.mark.parametrize("attention", ["softmax", "linear", "mgk", "smgk", "mlk", "smlk"])
def test_maps_are_the_weights_of_the_layers_and_heads_asked_for(attention):
    model = MgkForSequenceClassification(MgkConfig(attention=attention, **SMALL)).train()
    examples = [{"input_ids": torch.randint(17, (length,)), "labels": torch.tensor(1)} for length in (5, 9)]
    short, long = attention_maps(model, examples, layers=[2, -3], heads=[1])
    assert model.training
    assert short.weights.shape == (2, 1, 5, 5)
    assert long.weights.shape == (2, 1, 9, 9)
    assert (long.layers, long.heads, long.title(0, 0)) == ((2, 0), (1,), "layer 3, head 2")
    np.testing.assert_allclose(long.weights.sum(-1), 1, atol=1e-5)
    out = model.eval()(examples[1]["input_ids"][None], output_attentions=True)
    np.testing.assert_allclose(long.weights[0, 0], out.attentions[2][0, 1].detach(), atol=1e-6)


def test_maps_of_a_pair_and_of_running_text():
    ids = torch.randint(17, (6,))
    pair = MgkForDocumentRetrieval(MgkConfig(**SMALL))
    (maps,) = attention_maps(pair, [{"input_ids": ids, "input_ids_2": ids[:4], "labels": torch.tensor(0)}])
    assert maps.weights.shape == (3, 2, 6, 6)
    text = MgkForCausalLM(MgkConfig(attention="mlk", **SMALL))
    (maps,) = attention_maps(text, [{"input_ids": ids, "labels": ids, "shift_labels": ids}])
    assert np.triu(maps.weights, 1).max() == 0


def test_spread_of_known_maps():
    spread = attention_spread(np.full((8, 8), 1 / 8, np.float32))
    assert spread.positions == pytest.approx(8)
    own = attention_spread(np.eye(8, dtype=np.float32))
    assert (own.positions, own.nearby) == (pytest.approx(1), pytest.approx(1))
    first = np.zeros((8, 8), np.float32)
    first[:, 3] = 1
    assert (attention_spread(first).top_position, attention_spread(first).top_share) == (3, pytest.approx(1))


def test_pictures(tmp_path):
    maps = AttentionMaps(np.random.default_rng(0).random((2, 3, 7, 7), np.float32), (0, 1), (0, 1, 2))
    data = map_png(maps.weights[0, 0])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 7
    figure = draw_grid(maps, title="two layers", file=tmp_path / "grid.png")
    assert len(figure.axes) == 6
    assert (tmp_path / "grid.png").stat().st_size > 1000


def test_a_layer_that_is_not_there():
    model = MgkForSequenceClassification(MgkConfig(**SMALL))
    with pytest.raises(ValueError, match="layers must be from 0 to 2, got 3"):
        attention_maps(model, [], layers=[3])
