"""Let a job and the ranks that join it prove that they know one secret, which stays in the environment of both.

Only proofs are sent. Each is made over nonces that were drawn for one handshake, so that none can be used again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable
from typing import NoReturn

from ds_dynmo.config import RepackConfig
from ds_dynmo.errors import ConfigError, MigrationError

VARIABLE = "DS_DYNMO_JOIN_SECRET"
SHORTEST = 32  # characters
_NONCE_BYTES = 32


class JoinSecret:
    """Makes and checks proofs. It appears in no message and cannot be pickled, so that no checkpoint holds it."""

    def __init__(self, text: str) -> None:
        self._key = text.encode(errors="surrogateescape")

    @classmethod
    def from_environment(cls) -> JoinSecret:
        """Read the secret of this process.

        Raises:
            ConfigError: there is none, or it is too short.
        """
        text = os.environ.get(VARIABLE, "")
        if len(text) < SHORTEST:
            found = f"it has {len(text)} characters" if text else "it is not set"
            raise ConfigError(
                f"dynmo.repack.accept_joins = true needs a secret of {SHORTEST} characters or more in the environment "
                f"variable {VARIABLE}, the same for every rank of the job and of the launches that join it: {found}"
            )
        return cls(text)

    def proof(self, *facts: str) -> str:
        """Prove that this process knows the secret and says ``facts``; in hexadecimal digits."""
        return hmac.new(self._key, json.dumps(facts).encode(), hashlib.sha256).hexdigest()

    def proves(self, proof: str, *facts: str) -> bool:
        """Was ``proof`` made of these facts by somebody who knows the secret?"""
        return hmac.compare_digest(proof.encode(errors="replace"), self.proof(*facts).encode())

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled")


def secret_for(config: RepackConfig) -> JoinSecret | None:
    """Read the secret where ranks can join; None elsewhere.

    Raises:
        ConfigError: ranks can join, and there is none, or it is too short.
    """
    return JoinSecret.from_environment() if config.accept_joins else None


def new_nonce() -> str:
    """Draw a nonce, in hexadecimal digits."""
    return secrets.token_hex(_NONCE_BYTES)


def find_strangers(secret: JoinSecret, gather: Callable[[bytes], list[bytes]], rank: int, world: str) -> list[int]:
    """Find the ranks of a world that cannot prove over its connections that they know the secret. Collective.

    Args:
        gather: one byte string of every rank, all of one length, in rank order.
        rank: of this process in ``world``, which is the world's name.
    """
    nonces = [nonce.hex() for nonce in gather(bytes.fromhex(new_nonce()))]
    facts = ("member", world, *nonces)
    proofs = gather(bytes.fromhex(secret.proof(*facts, str(rank))))
    return [other for other, proof in enumerate(proofs) if not secret.proves(proof.hex(), *facts, str(other))]


def check_members(secret: JoinSecret, gather: Callable[[bytes], list[bytes]], rank: int, world: str) -> None:
    """Prove over the connections of a new world that every rank of it knows the secret. Collective.

    Call it before anything is unpickled that came over them: whoever connects may not be who was admitted.

    Args: as of :func:`find_strangers`.

    Raises:
        MigrationError: names the ranks that do not know it.
    """
    strangers = find_strangers(secret, gather, rank, world)
    if strangers:
        raise MigrationError(f"ranks {strangers} of the new world do not know the secret in {VARIABLE}")


def check_launch(secret: JoinSecret, gather: Callable[[bytes], list[bytes]], rank: int) -> None:
    """Refuse a launch whose ranks have different secrets: it would end at its first re-packing. Collective.

    Args: as of :func:`find_strangers`.

    Raises:
        ConfigError: on every rank; names those that have another secret than this one.
    """
    others = find_strangers(secret, gather, rank, "launch")
    if others:
        raise ConfigError(
            f"ranks {others} have another secret in {VARIABLE} than rank {rank}: set the same one on every host"
        )
