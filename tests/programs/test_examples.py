"""Every program in examples/ runs, checks itself, and has nothing to complain of."""

import shutil
from pathlib import Path

import pytest
from helpers import needs_installed, run_script

# `tox -e frameworks` runs them with all that they import.
pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 110.0  # seconds; each takes about one, and its framework ten to be imported
NEEDS = {
    "file_list_tensorflow.py": ("tensorflow",),
    "image_folder.py": ("PIL",),
    "jax_training.py": ("jax",),
    "keras_fit.py": ("keras", "torch"),
    "keras_loop.py": ("keras", "torch"),
    "on_a_cluster.py": ("ray",),
    "pack_and_train.py": ("h5py", "sklearn"),
    "torch_dataloader.py": ("torch",),
    "torch_training.py": ("torch",),
    "train_on_sequences.py": ("torch",),
}

RECIPES = EXAMPLES / "recipes"
RECIPES_NEED = {
    "accelerate_training.py": ("accelerate", "torch"),
    "audio_clips.py": ("soundfile",),
    "http_objects.py": ("aiohttp",),
    # A folder of the tests has the name of the first; the second comes with it.
    "hugging_face.py": ("datasets", "multiprocess"),
    "hugging_face_trainer.py": ("transformers", "torch", "accelerate"),
    "lightning_trainer.py": ("lightning", "torch"),
    "lmdb_records.py": ("lmdb",),
    "parquet.py": ("pyarrow",),
    "torch_checkpoint.py": ("torch",),
    "two_processes_ddp.py": ("torch",),
    "video_clips.py": ("av",),
    "webdataset_tars.py": ("webdataset",),
    "zarr_chunks.py": ("zarr",),
}
ALL_NEEDS = {EXAMPLES / name: needs for name, needs in NEEDS.items()} | {
    RECIPES / name: needs for name, needs in RECIPES_NEED.items()
}
ALL = sorted((*EXAMPLES.glob("*.py"), *RECIPES.glob("*.py")))


def test_there_are_examples_and_recipes():
    assert set(ALL_NEEDS) <= set(ALL)
    assert {path.name for path in RECIPES.glob("*.py")} == set(RECIPES_NEED)
    assert len(ALL) >= 36


RUN_NOTEBOOK = """
import os
import nbclient, nbformat

notebook = nbformat.read(os.environ["NOTEBOOK"], as_version=4)
nbclient.NotebookClient(notebook, timeout=100).execute()
outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
print(outputs[0]["text"], len(outputs))
"""


def test_the_notebook_runs(tmp_path):
    needs_installed("nbclient", "ipykernel")
    program = tmp_path / "run.py"
    program.write_text(RUN_NOTEBOOK)
    notebook = str(RECIPES / "notebook.ipynb")
    code, out, err = run_script(program, tmp_path, LIMIT, NOTEBOOK=notebook)
    assert code == 0, err
    assert out == "epoch 0: 320 rows\nepoch 1: 320 rows\n 2\n"


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_an_example_runs(path, tmp_path):
    needs_installed(*ALL_NEEDS.get(path, ()))
    code, out, err = run_script(path, tmp_path, LIMIT, KERAS_BACKEND="torch")
    assert code == 0, err
    assert err == "" or ALL_NEEDS.get(path)  # frameworks are talkative
    assert out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "path", [path for path, needs in ALL_NEEDS.items() if needs], ids=lambda path: path.name
)
def test_an_example_that_lacks_a_package_says_what_to_install(path, tmp_path):
    program = shutil.copy(path, tmp_path)
    for package in ALL_NEEDS[path]:
        error = f'ModuleNotFoundError("No module named {package!r}", name={package!r})'
        (tmp_path / f"{package}.py").write_text(f"raise {error}")
    code, out, err = run_script(program, tmp_path, LIMIT, PYTHONDONTWRITEBYTECODE="1")
    assert (code, out) == (2, "")  # 0 would say that it ran
    assert ": pip install " in err
    assert ALL_NEEDS[path][0] in err
    assert "Traceback" not in err


def test_what_was_packed_is_learnt_by_numpy_where_there_is_no_torch(tmp_path):
    needs_installed(*NEEDS["pack_and_train.py"])
    program = shutil.copy(EXAMPLES / "pack_and_train.py", tmp_path)
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    code, out, err = run_script(program, tmp_path, LIMIT)
    assert code == 0, err
    assert "epoch 9: loss 0." in out
