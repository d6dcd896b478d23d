from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from undercurrent.testing.cut_proxy import CutProxy

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def proxy() -> Iterator[CutProxy]:
    """A proxy before a server that says everything twice."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo(end: socket.socket) -> None:
            with end:
                while data := end.recv(100):
                    end.sendall(data * 2)

        def serve() -> None:
            try:
                while True:
                    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        made = CutProxy()
        made.target = f"127.0.0.1:{server.getsockname()[1]}"
        yield made
        made.close()
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10.0)


def connect(proxy: CutProxy) -> socket.socket:
    host, port = proxy.address.split(":")
    return socket.create_connection((host, int(port)), 30.0)


def test_what_is_sent_during_a_cut_arrives_when_it_is_over(proxy: CutProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(10) == b"aa"
        with proxy.cut():
            client.sendall(b"b")
            with connect(proxy) as later:
                later.sendall(b"c")
                for end in (client, later):
                    end.settimeout(0.3)
                    with pytest.raises(TimeoutError):
                        end.recv(10)
                    end.settimeout(30.0)
                proxy.mend()
                assert (client.recv(10), later.recv(10)) == (b"bb", b"cc")
    assert proxy.cuts == 1


def test_a_cut_with_a_reset_ends_the_connections_that_stand(proxy: CutProxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"a")
        assert client.recv(10) == b"aa"
        with proxy.cut(reset=True):
            assert client.recv(10) == b""
    with connect(proxy) as client:
        client.sendall(b"d")
        assert client.recv(10) == b"dd"
