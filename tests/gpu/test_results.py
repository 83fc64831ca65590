"""A results file stays within its limits, and says what it leaves out."""

from precondattn_gpu import results as module
from precondattn_gpu.results import LONGEST, Results, shortened
from precondattn_gpu.task import PASSED, TaskOutcome


def test_a_long_message_keeps_its_ends_and_says_what_is_missing():
    text = shortened("begin " + "x" * 100_000 + " end")
    assert len(text) <= LONGEST
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "characters are left out" in text


def test_a_file_at_its_limit_keeps_the_status_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 3000)
    results = Results("alive")
    for i in range(5):
        results.add(f"task {i}", TaskOutcome(PASSED, "y" * 1000, {"z": 1}), 1.0)
    kept = [entry for entry in results.tasks.values() if entry["data"]]
    assert len(kept) == 2
    assert "left out" in results.tasks["task 4"]["message"]
    assert {entry["status"] for entry in results.tasks.values()} == {PASSED}
    assert results.save(tmp_path).stat().st_size < 4000


def test_a_result_in_place_of_an_earlier_one_does_not_count_twice(monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 3000)
    results = Results("alive")
    for _ in range(10):
        results.add("task", TaskOutcome(PASSED, "y" * 1000), 1.0)
    assert results.tasks["task"]["message"] == "y" * 1000


def test_what_was_saved_is_what_is_loaded(tmp_path):
    results = Results("alive", {"device": "a GPU"})
    results.add("λ", TaskOutcome("wrong", "“off”\nby \ud800 3", {"error": 0.5}), 1.25, date="today")
    loaded = Results.load(results.save(tmp_path))
    assert loaded.machine == results.machine
    assert loaded.tasks["λ"]["data"] == {"error": 0.5}
    assert loaded.tasks["λ"]["date"] == "today"
    assert [path.name for path in tmp_path.iterdir()] == ["alive.json"]
