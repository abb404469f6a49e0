"""What is derived from the fleet's secret, and mailboxes between machines: who has it is heard, others are not."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import zmq

from prism.core.errors import InvalidValue
from prism.wire.mailbox import Inbox, Outbox
from prism.wire.messages import Cancel, encode
from prism.wire.secret import FleetSecret, make_secret, read_secret, with_password, without_password
from tests.patience import PATIENCE_S

OURS, THEIRS = FleetSecret("our secret, long enough"), FleetSecret("their secret, long enough")

TURNED_AWAY = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.DISCONNECTED
)


def test_a_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    file = tmp_path / "fleet.secret"
    made = make_secret(file)
    assert make_secret(file) == made == read_secret(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert made.text not in repr(made)


def test_a_missing_or_short_secret_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRISM_FLEET_SECRET", raising=False)
    with pytest.raises(InvalidValue, match="--secret-file"):
        read_secret(None)
    with pytest.raises(InvalidValue, match="cannot be read"):
        read_secret(tmp_path / "none")
    with pytest.raises(InvalidValue, match="at least 20"):
        FleetSecret("short")
    monkeypatch.setenv("PRISM_FLEET_SECRET", f" {OURS.text}\n")
    assert read_secret(None) == OURS


def test_every_use_has_its_own_key() -> None:
    keys = OURS.mail_keys()
    values = {OURS.store_password, OURS.weights.hex(), OURS.check_value(), keys.inbox_public, keys.sender_public}
    assert len(values) == 5
    assert OURS.mail_keys() == keys != THEIRS.mail_keys()
    assert keys.inbox_secret.decode() not in repr(keys)


def test_passwords_in_addresses() -> None:
    derived = OURS.store_password
    assert with_password("redis://10.0.0.1:6380/0", OURS) == f"redis://:{derived}@10.0.0.1:6380/0"
    assert with_password("redis://me@host", OURS) == f"redis://me:{derived}@host"
    assert with_password("rediss://:own@host", OURS) == "rediss://:own@host"
    assert with_password("unix:///run/x.sock", OURS) == "unix:///run/x.sock"
    assert without_password("redis://:own@host:1/0") == "redis://host:1/0"


async def test_who_has_the_secret_is_heard_over_tcp() -> None:
    keys = OURS.mail_keys()
    with Inbox("tcp://127.0.0.1:0", keys=keys) as inbox, Outbox(keys=keys) as outbox:
        assert outbox.send(inbox.address, Cancel(id="1", reason="a"))
        async with asyncio.timeout(PATIENCE_S):
            assert await inbox.recv() == Cancel(id="1", reason="a")


@pytest.mark.parametrize("way", ["another secret", "no keys", "the inbox's key alone"])
async def test_others_are_not_heard(way: str) -> None:
    keys = OURS.mail_keys()
    with Inbox("tcp://127.0.0.1:0", keys=keys) as inbox, Outbox(keys=keys) as good:
        context = zmq.Context()
        stranger = context.socket(zmq.PUSH)
        if way != "no keys":
            public, secret = zmq.curve_keypair()
            theirs = THEIRS.mail_keys()
            stranger.curve_serverkey = keys.inbox_public if way == "the inbox's key alone" else theirs.inbox_public
            stranger.curve_publickey, stranger.curve_secretkey = public, secret
        turned_away = stranger.get_monitor_socket(TURNED_AWAY)
        stranger.connect(inbox.address)
        stranger.send(encode(Cancel(id="stranger", reason="")))
        good.send(inbox.address, Cancel(id="good", reason=""))
        async with asyncio.timeout(PATIENCE_S):
            assert await inbox.recv() == Cancel(id="good", reason="")
        assert turned_away.poll(PATIENCE_S * 1000)
        assert inbox.drain() == []
        stranger.disable_monitor()
        turned_away.close(linger=0)
        stranger.close(linger=0)
        context.term()


def test_tcp_without_keys_is_refused() -> None:
    with pytest.raises(InvalidValue, match="secret"):
        Inbox("tcp://127.0.0.1:0")
    with Outbox() as outbox, pytest.raises(InvalidValue, match="secret"):
        outbox.send("tcp://127.0.0.1:1", Cancel(id="1", reason=""))


async def test_a_broken_connection_is_noticed_and_a_new_one_too() -> None:
    keys = OURS.mail_keys()
    with Outbox(keys=keys) as outbox:
        inbox = Inbox("tcp://127.0.0.1:0", keys=keys)
        address = inbox.address
        assert not outbox.broken(address)
        outbox.send(address, Cancel(id="1", reason=""))
        async with asyncio.timeout(PATIENCE_S):
            await inbox.recv()
        assert not outbox.broken(address)
        inbox.close()
        async with asyncio.timeout(PATIENCE_S):
            while not outbox.broken(address):
                await asyncio.sleep(0.01)
            with Inbox(address, keys=keys):
                while outbox.broken(address):
                    await asyncio.sleep(0.01)
