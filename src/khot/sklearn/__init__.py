"""Feature selection for scikit-learn pipelines; needs scikit-learn (``pip install '.[sklearn]'``)."""

try:
    from khot.sklearn._selector import KHotSelector
except ImportError as error:
    raise ImportError(
        "khot.sklearn needs scikit-learn >= 1.6: pip install '.[sklearn]' in a checkout of khot"
    ) from error

__all__ = ["KHotSelector"]


def __dir__() -> list[str]:
    return __all__
