from megafold.cache_store import Failure
from megafold.cache_store.ledger import ledger_failures, ledger_table

FIRST = Failure(
    entry="1abc", stage="msa", reason="query-mismatch", message="a.a3m: …", inputs=("x", "y"), attempts=2
)
SECOND = Failure(entry="1abc", stage="structure", reason="no-polymer", message="1abc.cif: …")


def test_failures_come_back_sorted():
    table = ledger_table([SECOND, FIRST])
    assert ledger_failures(table) == [FIRST, SECOND]
    assert table.digest() == ledger_table([FIRST, SECOND]).digest()
    assert table.table.num_rows == 2


def test_another_message_is_another_ledger():
    other = Failure(entry="1abc", stage="structure", reason="no-polymer", message="else")
    assert ledger_table([SECOND]).digest() != ledger_table([other]).digest()
    assert ledger_failures(ledger_table([])) == []
