from engine_worker.pausing import Pauses


def test_each_change_is_told_once():
    pauses, told = Pauses(), []

    def tell(reasons, hold=False):
        told.clear()
        pauses.tell(reasons, hold, lambda *said: told.append(said))
        return list(told)

    pauses.taken(0)
    assert tell({0: "catching up", 1: None}) == [(1, False)], "what was taken over begins paused"
    assert tell({0: "catching up", 1: None}) == []
    assert tell({0: None, 1: None}) == [(0, False)]
    assert tell({0: None, 1: None}, hold=True) == [(0, True), (1, True)]
    assert tell({0: "full", 1: None}) == [(1, False)]


def test_a_partition_that_comes_back_is_told_of_again():
    pauses, told = Pauses(), []
    pauses.taken(0)
    pauses.tell({0: None}, False, lambda *said: told.append(said))
    pauses.gone(0)
    pauses.taken(0)
    pauses.tell({0: None}, False, lambda *said: told.append(said))
    assert told == [(0, False), (0, False)]
