"""The metadata are in setup.cfg; the long description is README.md with complete addresses."""

import configparser
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def long_description() -> str:
    """Return README.md with links to the repository, as an index has no files beside it."""
    config = configparser.ConfigParser()
    config.read(HERE / "setup.cfg", encoding="utf-8")
    source = re.search(r"^Source = (.*)$", config["metadata"]["project_urls"], re.MULTILINE)[1]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!https?:|#)", f"]({source}/blob/main/", text)
    return re.sub(r'(src|srcset)="(?!https?:)', rf'\1="{source}/raw/main/', text)


setup(long_description=long_description())
