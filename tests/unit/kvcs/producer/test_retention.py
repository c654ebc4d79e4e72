from kvcs.kvsp.descriptor import Descriptor
from kvcs.producer.publication import Publication
from kvcs.producer.retention import Retention
from kvcs.profile.naming import PublicationName, new_publication_id

DESCRIPTOR = Descriptor(
    model="m", revision="1", layers=1, block_tokens=2, dtype="int8", k_shape=(1, 1), v_shape=(1, 1)
)


def publication() -> Publication:
    name = PublicationName(bytes(32), bytes(32), bytes(32), new_publication_id())
    return Publication(name, DESCRIPTOR)


def test_a_publication_expires_after_its_time_to_live() -> None:
    retention = Retention(ttl_s=10)
    one, other = publication(), publication()
    retention.finished(one, 100.0)
    retention.finished(other, 105.0)

    assert retention.next_deadline() == 110.0
    assert retention.expired(109.9) == []
    assert retention.expired(110.0) == [one]
    assert retention.expired(115.0) == [one, other]
    retention.forget(one)
    assert retention.next_deadline() == 115.0


def test_one_that_is_being_read_is_kept_until_the_last_reader_is_gone() -> None:
    retention = Retention(ttl_s=10)
    one = publication()
    retention.finished(one, 100.0)
    retention.reading(one.name.publication_id, +1)

    assert retention.next_deadline() == 120.0
    assert retention.expired(115.0) == []
    retention.reading(one.name.publication_id, -1)
    assert retention.expired(115.0) == [one]


def test_a_reader_that_never_ends_does_not_keep_it_for_ever() -> None:
    retention = Retention(ttl_s=10)
    one = publication()
    retention.finished(one, 100.0)
    retention.reading(one.name.publication_id, +1)

    assert retention.expired(119.9) == []
    assert retention.expired(120.0) == [one]


def test_what_is_not_finished_is_neither_expired_nor_let_go() -> None:
    retention = Retention(ttl_s=10)

    assert retention.next_deadline() is None
    assert retention.victim() is None


def test_the_oldest_goes_first() -> None:
    retention = Retention(ttl_s=10)
    one, other = publication(), publication()
    retention.finished(one, 1.0)
    retention.finished(other, 2.0)

    assert retention.victim() is one
    retention.forget(one)
    assert retention.victim() is other


def test_what_is_being_read_goes_after_what_is_not() -> None:
    retention = Retention(ttl_s=10)
    one, other = publication(), publication()
    retention.finished(one, 1.0)
    retention.finished(other, 2.0)
    retention.reading(one.name.publication_id, +1)
    retention.reading(one.name.publication_id, +1)
    retention.reading(one.name.publication_id, -1)

    assert retention.victim() is other
    retention.reading(other.name.publication_id, +1)
    assert retention.victim() is one
    retention.reading(one.name.publication_id, -1)
    assert retention.victim() is one


def test_readers_of_something_unknown_change_nothing() -> None:
    retention = Retention(ttl_s=10)
    retention.reading(bytes(16), -1)

    assert retention.victim() is None
