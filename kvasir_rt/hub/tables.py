"""The hub's tables. Their version stands in `kvasir_meta`; a change needs a new one and a step."""

from sqlalchemy import BigInteger, Boolean, Column, Float, Integer, MetaData, String, Table, Text

metadata = MetaData()
meta = Table(
    "kvasir_meta",
    metadata,
    Column("key", String(32), primary_key=True),
    Column("value", Text, nullable=False),
)
identities = Table(
    "kvasir_identities",
    metadata,
    Column("node", String(32), primary_key=True),
    Column("public_key", String(64), nullable=False),
    Column("first_seen_s", Float, nullable=False),  # Wall clock, for people.
    Column("last_seen_s", Float, nullable=False),
)
models = Table(
    "kvasir_models",
    metadata,
    Column("model", String(128), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("layers", Text, nullable=False),  # JSON.
    Column("experts", BigInteger, nullable=False),
    Column("hidden_size", BigInteger, nullable=False),
    Column("is_recruiting", Boolean, nullable=False),
)
claims = Table(
    "kvasir_claims",
    metadata,
    Column("claim", BigInteger, primary_key=True, autoincrement=False),
    Column("node", String(128), nullable=False),
    Column("model", String(128), nullable=False),
    Column("layer", BigInteger, nullable=False),
    Column("first", BigInteger, nullable=False),
    Column("stop", BigInteger, nullable=False),
    Column("expires_ns", BigInteger, nullable=False),  # On the clock of `written_ns`.
)
bans = Table(
    "kvasir_bans",
    metadata,
    Column("node", String(128), primary_key=True),
    Column("expires_ns", BigInteger, nullable=False),
)
proven = Table(
    "kvasir_proven",
    metadata,
    Column("worker", String(128), primary_key=True),
    Column("model", String(128), nullable=False),
    Column("layer", BigInteger, primary_key=True),
    Column("first", BigInteger, primary_key=True),
    Column("stop", BigInteger, primary_key=True),
    Column("last_serve_ms", BigInteger, nullable=False),
)
history = Table(
    "kvasir_history",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at_s", Float, nullable=False),  # Wall clock, for people.
    Column("kind", String(32), nullable=False),
    Column("model", String(128)),
    Column("node", String(128)),
    Column("detail", Text, nullable=False),
)
