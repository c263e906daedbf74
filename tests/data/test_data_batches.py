import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mgk.data import Collator, EpochBatches, load

# Of epoch 0 and seed 0 with 1,000 examples, 8 a batch: what any machine must take.
FIRST_BATCH = [634, 995, 231, 750, 297, 664, 59, 497]


def all_ranks(epoch: int, world_size: int, **options) -> list[list[list[int]]]:
    ranks = []
    for rank in range(world_size):
        batches = EpochBatches(rank=rank, world_size=world_size, **options)
        batches.set_epoch(epoch)
        ranks.append(list(batches))
        assert len(ranks[-1]) == len(batches)
    return ranks


@settings(max_examples=200, deadline=None)
@given(
    num_examples=st.integers(1, 300),
    batch_size=st.integers(1, 20),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 10),
    shuffle=st.booleans(),
    group=st.booleans(),
)
def test_every_example_once_an_epoch_over_all_ranks(
    num_examples: int, batch_size: int, world_size: int, epoch: int, shuffle: bool, group: bool
) -> None:
    options = {"num_examples": num_examples, "batch_size": batch_size, "shuffle": shuffle}
    if group and shuffle:
        options["lengths"] = np.arange(num_examples) % 7
    if num_examples < world_size:
        with pytest.raises(ValueError, match="too few"):
            all_ranks(epoch, world_size, **options)
        return
    ranks = all_ranks(epoch, world_size, **options)
    assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(num_examples))
    assert len({len(rank) for rank in ranks}) == 1
    sizes = [len(batch) for rank in ranks for batch in rank]
    assert min(sizes) >= 1
    assert max(sizes) <= batch_size + (world_size > 1)
    assert ranks == all_ranks(epoch, world_size, **options)


@pytest.mark.parametrize("lengths", [None, np.arange(100) % 13])
def test_seed_and_epoch_decide_the_order(lengths) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        batches = EpochBatches(100, 8, seed=seed, lengths=lengths)
        batches.set_epoch(epoch)
        return list(batches)

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(orders[a] != orders[b] for a in range(4) for b in range(a))
    assert order(0, 1) == orders[1]


def test_the_order_is_the_same_on_every_machine() -> None:
    assert next(iter(EpochBatches(1000, 8))) == FIRST_BATCH


@pytest.mark.parametrize("workers", [0, 2])
def test_going_on_in_the_middle_of_an_epoch(tmp_path: Path, workers: int) -> None:
    data = load("synthetic-text", "validation", folder=tmp_path)
    collator = Collator(data.pad_id)

    def run(start: int) -> list[dict[str, torch.Tensor]]:
        batches = EpochBatches(len(data), 7, seed=3, lengths=data.lengths)
        batches.set_epoch(2, start=start)
        return list(DataLoader(data, batch_sampler=batches, collate_fn=collator, num_workers=workers))

    whole, rest = run(0), run(4)
    assert len(whole) == 10
    assert len(rest) == 6
    for one, other in zip(whole[4:], rest, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=8),
    pad_id=st.sampled_from([0, 7, None]),
)
def test_the_collator_keeps_every_token_in_its_place(rows: list[list[int]], pad_id: int | None) -> None:
    examples = [{"input_ids": torch.tensor(row), "labels": torch.tensor(len(row))} for row in rows]
    batch = Collator(pad_id)(examples)
    longest = max(map(len, rows))
    assert batch["input_ids"].tolist() == [row + [pad_id or 0] * (longest - len(row)) for row in rows]
    assert batch["labels"].tolist() == [len(row) for row in rows]
    if pad_id is None:
        assert "attention_mask" not in batch
    else:
        assert batch["attention_mask"].tolist() == [[1] * len(row) + [0] * (longest - len(row)) for row in rows]


@settings(max_examples=50, deadline=None)
@given(num_examples=st.integers(3, 100), world_size=st.integers(1, 3), epoch=st.integers(0, 3), data=st.data())
def test_what_is_left_of_an_epoch_on_any_rank(num_examples: int, world_size: int, epoch: int, data) -> None:
    rank = data.draw(st.integers(0, world_size - 1))
    batches = EpochBatches(
        num_examples, 4, lengths=np.arange(num_examples) % 5, rank=rank, world_size=world_size
    )
    start = data.draw(st.integers(0, batches.steps))
    batches.set_epoch(epoch)
    whole = list(batches)
    batches.set_epoch(epoch, start)
    assert list(batches) == whole[start:]
    assert len(batches) == len(whole) - start


@pytest.mark.parametrize("name", ["listops", "retrieval", "image", "pathfinder", "wikitext-2", "plain"])
def test_one_loop_serves_every_kind_of_task(tmp_path: Path, name: str) -> None:
    data = load(f"synthetic-{name}", "validation", folder=str(tmp_path))
    assert data.vocab_size > 0
    assert len(data.lengths) == len(data)
    for place in (0, len(data) - 1):
        rows = [row for key, row in data[place].items() if key.startswith("input_ids")]
        assert data.lengths[place] == max(map(len, rows))
    batches = EpochBatches(len(data), 4, lengths=data.lengths)
    batch = next(iter(DataLoader(data, batch_sampler=batches, collate_fn=Collator(data.pad_id))))
    assert len(batch["input_ids"]) == len(batch["labels"]) == min(4, len(data))


def test_workers_that_are_spawned(tmp_path: Path) -> None:
    data = load("synthetic-text", "validation", folder=tmp_path)
    options = {"batch_size": 16, "collate_fn": Collator(data.pad_id)}
    here = list(DataLoader(data, **options))
    there = list(DataLoader(data, num_workers=1, multiprocessing_context="spawn", **options))
    assert len(here) == len(there) == 4
    assert all(torch.equal(one[name], two[name]) for one, two in zip(here, there, strict=True) for name in one)


def test_padding_is_to_the_longest_row_of_the_batch(tmp_path: Path) -> None:
    data = load("synthetic-retrieval", "train", folder=tmp_path)
    batch = Collator(data.pad_id)([data[i] for i in range(5)])
    for name, mask in (("input_ids", "attention_mask"), ("input_ids_2", "attention_mask_2")):
        lengths = [len(data[i][name]) for i in range(5)]
        assert batch[name].shape == batch[mask].shape == (5, max(lengths))
        assert batch[mask].sum(1).tolist() == lengths
        assert ((batch[name] == data.pad_id) == (batch[mask] == 0)).all()
        for i in range(5):
            assert torch.equal(batch[name][i, : lengths[i]], data[i][name])
    assert batch["labels"].tolist() == [int(data[i]["labels"]) for i in range(5)]
    assert "attention_mask" not in Collator()([{"input_ids": torch.arange(3), "labels": torch.tensor(1)}] * 2)


def test_the_last_segment_of_a_text_joins_a_batch(tmp_path: Path) -> None:
    data = load("synthetic-wikitext-2", "test", folder=tmp_path, max_length=100)
    last, before = data[-1], data[-2]
    batch = Collator()([before, last])
    length = len(last["input_ids"])
    assert length < 100
    assert batch.keys() == {"input_ids", "labels", "shift_labels"}
    assert all(rows.shape == (2, 100) for rows in batch.values())
    assert torch.equal(batch["shift_labels"][1, :length], last["shift_labels"])
    assert (batch["shift_labels"][1, length:] == -100).all()
    assert (batch["labels"][1, length:] == -100).all()


def test_grouping_by_length_saves_padding(tmp_path: Path) -> None:
    data = load("synthetic-text", "train", folder=tmp_path)

    def padded(lengths) -> int:
        batches = EpochBatches(len(data), 8, lengths=lengths)
        return sum(int(data.lengths[batch].max() * len(batch)) for batch in batches)

    assert padded(data.lengths) < 0.75 * padded(None)


def test_truncation_keeps_the_first_tokens(tmp_path: Path) -> None:
    whole = load("synthetic-text", "train", folder=tmp_path)
    short = load("synthetic-text", "train", folder=tmp_path, max_length=100)
    assert max(len(whole[i]["input_ids"]) for i in range(9)) > 100
    assert short.lengths.max() == 100
    for i in range(9):
        assert torch.equal(short[i]["input_ids"], whole[i]["input_ids"][:100])


def test_the_settings_of_the_paper() -> None:
    from mgk.data import TASKS

    lengths = {
        "listops": 2000,
        "text": 4000,
        "retrieval": 4000,
        "image": 1024,
        "pathfinder": 1024,
        "wikitext-103": 256,
    }
    assert {name: TASKS[name].max_length for name in lengths} == lengths


def test_data_sets_are_small_to_send_to_workers_and_index_as_lists(tmp_path: Path) -> None:
    for name in ("synthetic-text", "synthetic-image", "synthetic-retrieval", "synthetic-wikitext-2"):
        data = load(name, "train", folder=tmp_path)
        first, last = data[0], data[-1]
        sent = pickle.dumps(data)
        assert len(sent) < 10_000
        again = pickle.loads(sent)
        assert torch.equal(again[0]["input_ids"], first["input_ids"])
        assert torch.equal(again[len(data) - 1]["input_ids"], last["input_ids"])
        with pytest.raises(IndexError):
            data[len(data)]


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        EpochBatches(10, 0)
    with pytest.raises(ValueError, match="rank must be from 0 to world_size - 1 = 1, got 2"):
        EpochBatches(10, 1, rank=2, world_size=2)
    with pytest.raises(ValueError, match="lengths must have one for each of 10 examples, got 9"):
        EpochBatches(10, 2, lengths=[1] * 9)
    with pytest.raises(ValueError, match="lengths need shuffle=True"):
        EpochBatches(10, 2, lengths=[1] * 10, shuffle=False)
    with pytest.raises(ValueError, match="start must be from 0 to the 5 batches"):
        EpochBatches(10, 2).set_epoch(0, start=6)


def test_ranks_of_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "ranks.py"
    program.write_text(
        "import sys, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from mgk.data import EpochBatches, load\n"
        "dist.init_process_group('gloo')\n"
        "data = load('synthetic-text', 'validation', folder=Path(sys.argv[1]))\n"
        "batches = EpochBatches(len(data), 5)\n"
        "mine = [data[i]['input_ids'].tolist() for batch in batches for i in batch]\n"
        "everyone = [None, None]\n"
        "dist.all_gather_object(everyone, (mine, len(batches)))\n"
        "if dist.get_rank() == 0:\n"
        "    whole = [data[i]['input_ids'].tolist() for i in range(len(data))]\n"
        "    print(sorted(everyone[0][0] + everyone[1][0]) == sorted(whole), everyone[0][1] == everyone[1][1])\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(program), str(tmp_path / "data")], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == ["True", "True"], result.stderr


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    data = load("synthetic-text", "validation", folder=tmp_path, max_length=32)
    seen: list[int] = []

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(data.vocab_size, 2)

        def forward(self, input_ids, attention_mask, labels):
            seen.extend(input_ids.sum(1).tolist())
            logits = (self.embed(input_ids) * attention_mask[..., None]).mean(1)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=5,
        num_train_epochs=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        dataloader_num_workers=1,
        train_sampling_strategy="group_by_length",
    )
    transformers.Trainer(Model(), arguments, train_dataset=data, data_collator=Collator(data.pad_id)).train()
    assert sorted(seen) == sorted(int(data[i]["input_ids"].sum()) for i in range(len(data)))
