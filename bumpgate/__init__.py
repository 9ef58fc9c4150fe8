"""Is this torch, triton or kernel-wheel bump safe, and if not, which package broke what?"""


def __getattr__(name: str) -> str:
    """Read `__version__` when it is asked for: a lane run imports the package often, and needs no version."""
    if name != "__version__":
        raise AttributeError(f"module 'bumpgate' has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("bumpgate")
    except metadata.PackageNotFoundError:
        return "0+source"  # run from the source tree
