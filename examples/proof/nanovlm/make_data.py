"""Make a tokenizer, and questions about images of one colour, as nanoVLM reads them.

`samples` is for training; `damaged` has one image in its middle that cannot be decoded.
"""

import random
from pathlib import Path

import datasets
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

COUNT, SIZE, TOKENS = 600, 128, 400

rng = random.Random(7)
words = ["".join(rng.choices("aeinorst", k=rng.randint(2, 9))) for _ in range(500)]


def text():
    return " ".join(rng.choices(words, k=rng.randint(3, 25)))


tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
trainer = trainers.BpeTrainer(
    vocab_size=TOKENS,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<|im_start|>", "<|im_end|>"],
)
tokenizer.train_from_iterator((text() for _ in range(COUNT)), trainer)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>").save_pretrained(
    "tokenizer"
)

colours = [tuple(rng.choices(range(256), k=3)) for _ in range(COUNT)]
images = []
for colour in colours:
    Path("image.png").unlink(missing_ok=True)
    Image.new("RGB", (SIZE, SIZE), colour).save("image.png")
    images.append({"bytes": Path("image.png").read_bytes(), "path": None})
features = datasets.Features(
    {
        "images": [datasets.Image()],
        "texts": [{"user": datasets.Value("string"), "assistant": datasets.Value("string")}],
    }
)
texts = [[{"user": text(), "assistant": text()}] for _ in range(COUNT)]
for folder in ("samples", "damaged"):
    Path(folder).mkdir()
    rows = {"images": [[image] for image in images], "texts": texts}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(f"{folder}/train.parquet")
    images[COUNT // 2]["bytes"] = b"no image"
