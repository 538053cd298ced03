"""The journal of a rank: what is in it after every call, and what a kill, a restart, a full disk or a fork do to it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
import warnings
from unittest.mock import Mock, call

import pytest
import torch

from mlpo_hpc.engine.journaling import Journaling
from mlpo_hpc.errors import MlpoError, StorageError
from mlpo_hpc.report.journals import find_journals, read_journals
from mlpo_hpc.telemetry.journal import Journal, open_journal

START = {"began_s": 1.0, "world_rank": 0, "world_size": 1, "host": "n1", "tiers": {}}
REPORT = {
    "step": 3,
    "forward_s": 0.1234567891,
    "bytes_read": 10,
    "tiers": {"nvme": {"bytes_read": 10, "read_s": 0.5, "container": "raw", "tokens": {"scope": "off"}}},
}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_is_in_the_file_as_soon_as_it_is_told(tmp_path):
    journal = open_journal(str(tmp_path / "new/folder"), 5, START)
    path = tmp_path / "new/folder/steps-5.jsonl"
    assert lines(path) == [{"start": START}]
    journal.step(7, REPORT)
    journal.loss(2.5, 4096)
    first, loss = lines(path)[1:]
    assert first["step"] == 7
    assert first["iteration_s"] is None, "there was none before it"
    assert first["forward_s"] == 0.123457
    assert first["tiers"] == {"nvme": {"bytes_read": 10, "read_s": 0.5}}, "numbers alone"
    assert loss == {"step": 7, "loss": 2.5, "text_tokens": 4096}
    journal.step(8, REPORT)
    assert lines(path)[-1]["iteration_s"] >= 0
    journal.close()
    journal.close()
    assert len(lines(path)) == 4


def test_a_line_is_small(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    before = os.path.getsize(journal.path)
    journal.step(10**6, {**REPORT, "tiers": dict.fromkeys(("nvme", "pfs"), REPORT["tiers"]["nvme"])})
    assert os.path.getsize(journal.path) - before < 500
    journal.close()


def test_nobody_else_reads_it(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    assert stat.S_IMODE(os.stat(journal.path).st_mode) == 0o600
    journal.close()


def test_a_restart_appends_after_a_torn_line(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    journal.step(1, REPORT)
    journal.close()
    with open(journal.path, "a") as file:
        file.write('{"forward_s":0.1,"st')  # killed here
    again = open_journal(str(tmp_path), 0, {**START, "began_s": 2.0})
    again.step(2, REPORT)
    again.close()
    found = read_journals(find_journals(tmp_path))
    assert [sorted(part.steps) for part in found.parts] == [[1], [2]]
    assert found.num_torn == 1


def test_two_engines_or_jobs_do_not_write_one_journal(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    with pytest.raises(StorageError, match=r"another engine or job .*'telemetry.dir'"):
        open_journal(str(tmp_path), 0, START)
    journal.close()
    open_journal(str(tmp_path), 0, START).close()


def test_a_loss_that_is_no_number_is_json_all_the_same(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    journal.step(1, REPORT)
    journal.loss(math.inf)
    journal.close()
    assert lines(tmp_path / "steps-0.jsonl")[-1]["loss"] is None
    (part,) = read_journals(find_journals(tmp_path)).parts
    assert math.isnan(part.losses[1][0])


class FullDisk:
    """A file that takes a part of a line, then nothing."""

    def __init__(self, file, left):
        self._file, self._left, self.closed = file, left, False

    def fileno(self):
        return self._file.fileno()

    def write(self, text):
        if not self._left:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        taken, self._left = min(self._left, len(text)), max(0, self._left - len(text))
        return self._file.write(text[:taken])

    def close(self):
        self.closed = True
        self._file.close()


@pytest.mark.parametrize("left", [0, 20])
def test_a_full_disk_ends_the_journal_with_a_warning_and_not_the_training(tmp_path, caplog, left):
    journal = open_journal(str(tmp_path), 0, START)
    journal._file = FullDisk(journal._file, left)
    with caplog.at_level(logging.WARNING, "mlpo_hpc"):
        for number in range(3):
            journal.step(number, REPORT)
            journal.loss(1.0)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the journal ends here" in caplog.text
    assert journal.path in caplog.text


def test_a_place_that_takes_no_journal_is_an_error_with_advice(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="telemetry directory"):
        open_journal(str(tmp_path / "file"), 0, START)
    with pytest.raises(StorageError, match="beginning a journal"):
        Journal(str(tmp_path), START)


def test_a_forked_worker_leaves_it_alone(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    journal.step(1, REPORT)
    child = os.fork()
    if not child:
        journal.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(StorageError, match="another engine or job"):
        open_journal(str(tmp_path), 0, START)
    journal.step(2, REPORT)
    journal.close()
    assert [line.get("step") for line in lines(tmp_path / "steps-0.jsonl")] == [None, 1, 2]


def test_a_loss_before_the_first_step_is_an_error(tmp_path):
    journal = open_journal(str(tmp_path), 0, START)
    with pytest.raises(MlpoError, match="after engine.step"):
        journal.loss(1.0)
    journal.close()


def test_a_loss_may_be_what_the_model_returned():
    """A tensor with a gradient, of which torch warns if it is made a number by other means."""
    training = Journaling()
    training.journal = Mock()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.record_loss(torch.tensor(2.5, requires_grad=True) * 1, 7)
        training.record_loss(1.5)
    assert training.journal.loss.mock_calls == [call(2.5, 7), call(1.5, None)]
