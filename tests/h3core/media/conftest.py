import pytest


@pytest.fixture(params=["mp4", "mkv"])
def container(request):
    """Ending of a container: one with an exact clock, one that rounds to milliseconds."""
    return request.param
