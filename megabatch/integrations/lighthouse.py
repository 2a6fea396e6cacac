"""`call_while_it_answers`: a call that waits for torchft's Lighthouse, given up once the Lighthouse is gone.

torchft 0.2.0 sends a request once. If the Lighthouse dies meanwhile, the request waits until its timeout, even if
another Lighthouse has started at the same address.
"""

import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from megabatch.errors import MegabatchError, in_one_line

SECONDS_BETWEEN_QUESTIONS = 1.0
SECONDS_TO_ANSWER = 10.0


class LighthouseError(MegabatchError):
    """The Lighthouse does not answer. Every replica ends, and resumes from a checkpoint."""


def call_while_it_answers(address: str, call: Callable[[], None]) -> None:
    """Run a call in a thread. Ask the Lighthouse every second if it is there, until the call returns.

    Args:
        address: Of the Lighthouse, "http://HOST:PORT". Empty: nobody is asked.
        call: Goes on in its thread after a `LighthouseError`, until torchft's timeout.

    Raises:
        LighthouseError: The Lighthouse refuses a connection, has closed it, or takes more than 10 seconds to answer.
    """
    if not address:
        return call()
    has_ended, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        finally:
            has_ended.set()

    connection = HTTPConnection(urlsplit(address).netloc, timeout=SECONDS_TO_ANSWER)
    try:
        # Before the request of the call: a connection that is still open belongs to the Lighthouse that has it.
        connection.connect()
        threading.Thread(target=run, daemon=True, name="quorum").start()
        while not has_ended.wait(SECONDS_BETWEEN_QUESTIONS):
            connection.request("GET", "/status")
            connection.getresponse().read()
    except (OSError, HTTPException) as error:
        raise LighthouseError(
            f"the Lighthouse at {address} does not answer ({in_one_line(error)}); start torchft_lighthouse there, and "
            "start the replicas again, which resume from their last checkpoint"
        ) from None
    finally:
        connection.close()
    if errors:
        raise errors[0]
    return None
