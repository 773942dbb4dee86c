"""What an operator replaces under a running server: its key, its certificate, its access log."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from sinew_client import Client
from sinew_client.auth import api_key_of
from sinew_client.errors import ServerError
from websockets.sync.client import connect

from sinew.cli.serve_listen import Listening
from sinew.core import SinewError
from sinew.serve.access_log import access_logging
from sinew.serve.decode.array import pack
from sinew.serve.renewed import _quiet
from sinew.serve.transport.listen import Listen
from tests.serve.puppet import GOOD, desk


def accepted(address: str, key: str) -> bool:
    with Client(address, timeout=60.0, api_key=key) as client, contextlib.suppress(ServerError):
        client.infer(GOOD)
        return True
    return False


def test_keys_of_a_running_server_are_exchanged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Both for a while, then the new one alone; a file that is empty opens nothing."""
    caplog.set_level(logging.INFO)
    file = tmp_path / "key.txt"
    file.write_text("first\n")
    _, _, key = Listening(api_key_file=file, wire=("native",)).prepared()
    with desk(api_key=key) as at:
        asked = [(file.write_text(text), [accepted(at.native, each) for each in ("first", "second", "")])[1]
                 for text in ("first\n", "second\nfirst\n", "second\n", "", "second\nthird\n")]  # fmt: skip
        assert asked == [[True, False, False], [True, True, False]] + [[False, True, False]] * 3
    assert api_key_of(file) == "second"  # what a client sends
    asks = pack({"images": {"front": GOOD["images"]["front"]}, "state": GOOD["state"], "prompt": "go"})
    header = {"Authorization": "Api-Key second"}
    with desk(("openpi",), api_key=key) as at, connect(at.openpi, additional_headers=header) as socket:
        socket.recv(60)  # the metadata
        socket.send(asks)
        assert isinstance(socket.recv(60), bytes)
        file.write_text("third\n")  # it was let in with another
        socket.send(asks)
        assert "[unauthorized]" in socket.recv(60)
    assert f"{file}: changed, and read again" in caplog.messages
    said = (
        f"{file}: the files have changed but are not usable; the old content stays: --api-key-file {file}: "
    )
    said += "the file is empty; write a key into it"
    assert said in caplog.messages


def shown(address: str) -> str:
    """The certificate that a server shows, PEM, without a name asked for."""
    host, port = address.removeprefix("wss://").split(":")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as connection:
        return ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")


def test_a_certificate_is_renewed_under_a_running_server(
    certificate: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _quiet._since = float("-inf")  # other tests may have had its lines
    cert, key = (Path(shutil.copy(each, tmp_path)) for each in certificate)
    former = cert.read_text()
    new = [tmp_path / "new.pem", tmp_path / "new.key"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subprocess.run(
        [*made, "-subj", "/CN=new", "-out", new[0], "-keyout", new[1]], check=True, capture_output=True
    )
    with desk(("openpi",), listen=Listen(tls_cert=cert, tls_key=key)) as at:
        assert shown(at.openpi) == former
        renewed = new[0].read_text()
        new[0].replace(cert)
        assert shown(at.openpi) == former  # its key has not come yet
        assert "the old content stays: TLS: " in caplog.text
        new[1].replace(key)
        assert shown(at.openpi) == renewed


def test_an_access_log_begins_anew_where_it_was_moved_away(tmp_path: Path) -> None:
    """As logrotate does, without a signal; a folder that is gone loses lines, not requests."""
    file, moved = tmp_path / "logs" / "access.jsonl", tmp_path / "access.jsonl.1"
    file.parent.mkdir()
    log = logging.getLogger("sinew.access")
    with access_logging(str(file)):
        log.info("1")
        file.replace(moved)
        log.info("2")
        assert (moved.read_text(), file.read_text()) == ("1\n", "2\n")
        shutil.rmtree(file.parent)
        log.info("3")
        file.parent.mkdir()
        log.info("4")
        assert file.read_text() == "4\n"


def test_files_that_are_no_pair_are_told_apart_and_one_that_ended_is_said(
    certificate: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The line that an operator types, with each wrong file; OpenSSL says `PEM lib` of all, and asks the terminal for a
    passphrase."""
    monkeypatch.chdir(tmp_path)
    for each, name in zip(certificate, ("cert.pem", "key.pem"), strict=True):
        shutil.copy(each, name)
    locked = [
        "genpkey",
        "-algorithm",
        "EC",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-aes256",
        "-pass",
        "pass:word",
    ]
    other = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=other",
    ]
    for words in (
        [*locked, "-out", "locked.pem"],
        [*other, "-keyout", "other.pem", "-out", "other.crt"],
        ["req", "-new", "-key", "key.pem", "-subj", "/CN=old", "-out", "old.csr"],
        ["x509", "-req", "-in", "old.csr", "-signkey", "key.pem", "-days", "-1", "-out", "old.pem"],
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    for given, words in (
        (
            ("cert.pem", "other.pem"),
            "--tls-cert cert.pem, --tls-key other.pem: the key does not belong to this certificate",
        ),
        (
            ("key.pem", "cert.pem"),
            "--tls-cert key.pem: expected a PEM file with a certificate, got a file without it",
        ),
        (
            ("cert.pem", "locked.pem"),
            "--tls-key locked.pem: expected a PEM file with a private key without a",
        ),
        (("cert.pem", "gone.pem"), "--tls-key gone.pem: expected a PEM file with a private key without a"),
        (("cert.pem",), "without --tls-key cert.pem: expected a PEM file with a private key without a"),
    ):
        with pytest.raises(SinewError, match=re.escape(words)):
            Listen(tls_cert=Path(given[0]), tls_key=Path(given[1]) if given[1:] else None).tls()
    Listen(tls_cert=Path("cert.pem"), tls_key=Path("key.pem")).tls()
    assert not [each for each in caplog.messages if "clients reject it" in each]
    Listen(tls_cert=Path("old.pem"), tls_key=Path("key.pem")).tls()
    assert re.search(
        r"TLS: --tls-cert old.pem: the certificate ended on 20\d{12} \(UTC\), so clients reject it",
        caplog.text,
    )
