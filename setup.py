from setuptools import find_packages, setup

setup(
    name="ds_dynmo",
    version="0.1.0",
    description="A DeepSpeed pipeline that re-balances itself while it trains",
    packages=find_packages(include=["ds_dynmo", "ds_dynmo.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.9",  # sparse attention: the first that has FlexAttention's AuxRequest; tested: 2.13.0
        "deepspeed==0.19.8",
        "numpy",
        "pydantic>=2",
    ],
    extras_require={
        "huggingface": ["transformers>=5.23", "safetensors"],  # what was tested; before 5, experts were modules
        "kubernetes": ["kubernetes>=36"],  # the official client: release policy "kubernetes", nothing else
        "docs": ["mkdocs>=1.6"],  # docs/ as a site, nothing else
        "plots": ["matplotlib>=3.8"],  # pictures of a run: scripts/plot.py, nothing else
        "test": [  # the extras above too, and what tests read or move: none is skipped for want of one
            "pytest",
            "pytest-xdist>=3.6",
            "ruff>=0.17,<0.18",
            "mypy",
            "kubernetes>=36",
            "transformers>=5.23",
            "safetensors",
            "peft",
            "matplotlib>=3.8",
            "mkdocs>=1.6",
            "tensorboard",
        ],
    },
)
