"""Train a small model with nanoVLM's train.py, which has no arguments for its size: train.py DATA.

DATA is one of the folders of `make_data.py`. The weights are random: nothing is downloaded.
"""

import functools
import importlib
import sys

from data.processors import get_tokenizer
from models.config import TrainConfig, VLMConfig

SIZES = {
    "vit_hidden_dim": 32,
    "vit_inter_dim": 64,
    "vit_img_size": 64,
    "vit_n_heads": 2,
    "vit_n_blocks": 1,
    "lm_hidden_dim": 32,
    "lm_inter_dim": 64,
    "lm_n_heads": 2,
    "lm_n_kv_heads": 1,
    "lm_n_blocks": 1,
    "lm_max_length": 256,
    "lm_vocab_size": 512,
    "mp_pixel_shuffle_factor": 2,
    "mp_image_token_length": 4,
    "max_img_size": 128,
}
model = VLMConfig(lm_tokenizer="tokenizer", vlm_load_backbone_weights=False, **SIZES)
training = TrainConfig(
    train_dataset_path=sys.argv[1],
    stream_dataset=False,
    val_size=32,
    max_sample_length=200,
    eval_in_epochs=False,
    log_wandb=False,
)
# Transformers 5 returns a dictionary unless it is told otherwise.
tokenizer = get_tokenizer(model.lm_tokenizer, model.vlm_extra_tokens, model.lm_chat_template)
tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
# Its train.py, not this one.
del sys.path[0]
importlib.import_module("train").train(training, model)
