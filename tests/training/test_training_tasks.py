"""The examples of a recipe."""

from mgk.data import prepare
from mgk.training.recipe import load_recipe
from mgk.training.tasks import count, open_data


def labels_of(folder, task, limit):
    data = load_recipe(task, "smoke", overrides={"data.test_examples": limit, "data.folder": str(folder)}).data
    test = open_data(data).split("test")
    return [int(test[number]["labels"]) for number in range(count(test))]


def test_a_part_of_a_split_has_its_classes_whatever_their_order(tmp_path):
    prepare("synthetic-text", out=tmp_path)  # its classes take turns
    whole, part = labels_of(tmp_path, "text", None), labels_of(tmp_path, "text", 16)
    assert whole[:4] in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert len(part) == 16
    assert 4 <= sum(part) <= 12
    assert part == labels_of(tmp_path, "text", 16)
    assert labels_of(tmp_path, "text", 10_000) == whole
