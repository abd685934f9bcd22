//! Many threads on one connection, and generations that end under them.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use failstop_pci::id::Generation;
use failstop_pci::transport::vfio_user::socket;
use failstop_pci::transport::vfio_user::wire::Command;
use failstop_pci::transport::vfio_user::{Broken, Client, Options, Violation};
use failstop_pci::transport::{AccessError, RegionIndex, Transport};

use crate::support::{Peer, opened, opened_narrow, patient};

const BAR0: RegionIndex = RegionIndex::Bar(0);

fn read(client: &Client, offset: u64) -> Result<u32, AccessError> {
    let mut data = [0; 4];
    client.read(Generation::FIRST, BAR0, offset, &mut data)?;
    Ok(u32::from_le_bytes(data))
}

fn post(client: &Client, generation: Generation, offset: u64) -> Result<(), AccessError> {
    let data = (generation.number() as u32).to_le_bytes();
    client.post(generation, BAR0, offset, &data)
}

#[test]
fn answers_in_reverse_order_reach_those_who_asked() {
    let (client, server) = opened(patient(), |peer| {
        let first = peer.expect(Command::RegionRead);
        let second = peer.expect(Command::RegionRead);
        for asked in [second, first] {
            peer.answer_read(&asked, asked.access().offset as u32 + 1);
        }
        peer.expect_hang_up();
    });
    let values = std::thread::scope(|scope| {
        let one = scope.spawn(|| read(&client, 0x10).unwrap());
        let two = scope.spawn(|| read(&client, 0x20).unwrap());
        (one.join().unwrap(), two.join().unwrap())
    });
    drop(client);
    server.join();
    assert_eq!(values, (0x11, 0x21));
}

/// Whether or not the thread that asked has seen the first answer by then.
#[test]
fn second_answer_to_one_of_two_threads_is_a_violation() {
    let (client, server) = opened(patient(), |mut peer| {
        let first = peer.expect(Command::RegionRead);
        let second = peer.expect(Command::RegionRead);
        // In one piece: the client ends the connection at the second answer.
        let answers = [(&second, 1), (&second, 2), (&first, 3)];
        peer.raw(
            &answers
                .map(|(asked, value)| Peer::read_answer(asked, value))
                .concat(),
        );
        while peer.receive().is_some() {}
    });
    let values = std::thread::scope(|scope| {
        let one = scope.spawn(|| read(&client, 0x10).ok());
        let two = scope.spawn(|| read(&client, 0x20).ok());
        [one.join().unwrap(), two.join().unwrap()]
    });
    server.join();
    assert!(
        !values.contains(&Some(2)) && !values.contains(&Some(3)),
        "{values:?}"
    );
    assert!(matches!(
        client.broken(),
        Some(Broken::Protocol(Violation::Unasked { .. }))
    ));
}

#[test]
fn many_threads_each_get_their_own_answers() {
    const THREADS: u64 = 4;
    const READS: u64 = 500;
    let (client, server) = opened(patient(), |peer| {
        // Answers two questions at a time, the later one first, where there are two.
        let mut held = None;
        for n in 0..THREADS * READS {
            let asked = peer.expect(Command::RegionRead);
            let answer = |peer: &Peer, asked| {
                let asked: crate::support::Received = asked;
                peer.answer_read(&asked, asked.access().offset as u32);
            };
            // The last threads may be alone: only hold back while all are sure to ask on.
            if held.is_none() && n % 3 == 0 && n < READS {
                held = Some(asked);
                continue;
            }
            answer(&peer, asked);
            if let Some(asked) = held.take() {
                answer(&peer, asked);
            }
        }
        peer.expect_hang_up();
    });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let client = &client;
            scope.spawn(move || {
                for n in 0..READS {
                    let offset = (thread << 12) + 4 * n;
                    assert_eq!(u64::from(read(client, offset).unwrap()), offset);
                }
            });
        }
    });
    drop(client);
    server.join();
}

/// Or an answer to one, which no server may send, could be taken for that to the other.
#[test]
fn posted_write_never_has_the_id_of_an_open_question() {
    let (client, server) = opened(patient(), |peer| {
        let all: Vec<_> = (0..101)
            .map(|_| peer.expect(Command::RegionWrite))
            .collect();
        let (posted, asked): (Vec<_>, Vec<_>) = all.iter().partition(|m| m.header.wants_no_reply());
        let asked = asked[0];
        assert!(posted.iter().all(|m| m.header.id != asked.header.id));
        peer.reply(asked, &asked.payload[..16]);
        peer.expect_hang_up();
    });
    std::thread::scope(|scope| {
        let client = &client;
        scope.spawn(|| client.write(Generation::FIRST, BAR0, 0, &[0; 4]).unwrap());
        for _ in 0..100 {
            post(client, Generation::FIRST, 0).unwrap();
        }
    });
    drop(client);
    server.join();
}

#[test]
fn end_wakes_everybody() {
    let (client, server) = opened(patient(), |peer| {
        for _ in 0..3 {
            peer.expect(Command::RegionRead);
        }
    });
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|n| {
                let client = &client;
                scope.spawn(move || read(client, 4 * n))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    server.join();
    assert!(results.iter().all(Result::is_err));
    assert_eq!(client.broken(), Some(Broken::Closed));
}

#[test]
fn deadline_of_one_ends_the_connection_for_all() {
    let options = Options {
        deadline: Duration::from_millis(300),
        // The reset is asked first, and would wait for much longer.
        reset_deadline: Duration::from_secs(60),
        peer: None,
    };
    let (asked, was_asked) = channel();
    let (client, server) = opened(options, move |peer| {
        peer.expect(Command::DeviceReset);
        asked.send(()).unwrap();
        peer.expect(Command::RegionRead);
        peer.expect_hang_up();
    });
    std::thread::scope(|scope| {
        let reset = scope.spawn(|| client.reset());
        was_asked.recv().unwrap();
        read(&client, 0).unwrap_err();
        reset.join().unwrap().unwrap_err();
    });
    server.join();
    assert!(matches!(client.broken(), Some(Broken::TimedOut { .. })));
}

#[test]
fn expired_generation_is_refused_unsent_and_the_next_is_served() {
    let (client, server) = opened(patient(), |peer| {
        let posted = peer.expect(Command::RegionWrite);
        assert_eq!(posted.payload[16], 2);
        peer.expect_hang_up();
    });
    let first = Generation::FIRST;
    client.expire(first);
    let mut data = [0; 4];
    let results = [
        client.read(first, BAR0, 0, &mut data),
        client.write(first, BAR0, 0, &data),
        client.post(first, BAR0, 0, &data),
    ];
    post(&client, first.next(), 0).unwrap();
    drop(client);
    server.join();
    for result in results {
        assert!(matches!(result, Err(AccessError::Expired { .. })));
    }
}

#[test]
fn expiring_an_older_generation_again_does_not_revive_the_newer() {
    let (client, server) = opened(patient(), |peer| peer.expect_hang_up());
    let second = Generation::FIRST.next();
    client.expire(second);
    client.expire(Generation::FIRST);
    let result = post(&client, second, 0);
    drop(client);
    server.join();
    assert!(matches!(result, Err(AccessError::Expired { .. })));
}

/// The ladder turns bus mastering off when the life is over.
#[test]
fn config_space_is_reached_by_an_expired_generation() {
    let (client, server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::RegionWrite);
        assert_eq!((asked.access().region, asked.access().offset), (7, 4));
        peer.reply(&asked, &asked.payload[..16]);
        peer.expect_hang_up();
    });
    let first = Generation::FIRST;
    client.expire(first);
    client
        .write(first, RegionIndex::Config, 4, &[3, 0])
        .unwrap();
    drop(client);
    server.join();
}

/// The writer of each generation hammers at offset 0; after `expire` returned, a write of the next
/// generation at offset 4 marks the moment on the wire.
#[test]
fn c33_no_write_of_an_older_generation_is_sent_after_expire_returned() {
    const LIVES: u64 = 100;
    let (client, server) = opened(patient(), |peer| {
        let mut over = 0;
        while let Some(posted) = peer.receive() {
            let generation = u64::from(u32::from_le_bytes(
                posted.payload[16..20].try_into().unwrap(),
            ));
            assert!(generation > over, "a write of {generation} after its end");
            if posted.access().offset == 4 {
                over = generation - 1;
            }
        }
        assert_eq!(over, LIVES);
    });
    let mut generation = Generation::FIRST;
    while generation.number() <= LIVES {
        std::thread::scope(|scope| {
            let (hammering, begun) = channel();
            let client = &client;
            scope.spawn(move || {
                post(client, generation, 0).unwrap();
                hammering.send(()).unwrap();
                while post(client, generation, 0).is_ok() {}
            });
            begun.recv().unwrap();
            client.expire(generation);
            post(client, generation.next(), 4).unwrap();
        });
        generation = generation.next();
    }
    assert_eq!(client.broken(), None);
    drop(client);
    server.join();
}

#[test]
fn server_that_does_not_read_is_given_up_at_the_deadline() {
    let (release, released) = channel::<()>();
    let (client, server) = opened(crate::support::impatient(), move |peer| {
        let _ = released.recv();
        drop(peer);
    });
    let error = loop {
        if let Err(error) = post(&client, Generation::FIRST, 0) {
            break error;
        }
    };
    let AccessError::Failed { source, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(source.kind(), io::ErrorKind::TimedOut);
    drop(release);
    server.join();
}

/// A thread that waits for room must not keep the ladder from ending the generation.
#[test]
fn expire_does_not_wait_for_a_server_that_does_not_read() {
    let options = Options {
        deadline: Duration::from_secs(60),
        ..patient()
    };
    let (release, released) = channel::<()>();
    let (client, server) = opened(options, move |peer| {
        released.recv().unwrap();
        while peer.receive().is_some() {}
    });
    std::thread::scope(|scope| {
        let (progress, blocked) = channel();
        let client = &client;
        let writer = scope.spawn(move || {
            loop {
                if let Err(error) = post(client, Generation::FIRST, 0) {
                    return error;
                }
                let _ = progress.send(());
            }
        });
        // No progress for a while: the socket is full, and the writer waits for room.
        while blocked.recv_timeout(Duration::from_millis(100)).is_ok() {}
        client.expire(Generation::FIRST);
        release.send(()).unwrap();
        let error = writer.join().unwrap();
        assert!(matches!(error, AccessError::Expired { .. }), "{error}");
    });
    drop(client);
    server.join();
}

/// A message that is half out when its generation ends must be whole before `expire` returns: on
/// return nothing of an older generation is still being sent.
#[test]
fn c33_expire_returns_after_a_message_that_is_half_sent() {
    let first = Generation::FIRST;
    let (begun, begins) = channel();
    let (expired, was_expired) = channel();
    let (client, server) = opened_narrow(patient(), move |peer| {
        let (header, _) = socket::receive_header(peer.fd(), 0, None).unwrap();
        begun.send(()).unwrap();
        let early = was_expired.recv_timeout(Duration::from_millis(100));
        assert_eq!(early, Err(RecvTimeoutError::Timeout));
        let mut payload = vec![0; header.payload().unwrap()];
        socket::receive_payload(peer.fd(), &mut payload, None).unwrap();
        let marker = peer.expect(Command::RegionWrite);
        assert_eq!((payload.len(), marker.access().offset), (16 + 0x2_0000, 4));
    });
    std::thread::scope(|scope| {
        let client = &client;
        scope.spawn(move || client.post(first, BAR0, 0, &[0; 0x2_0000]).unwrap());
        begins.recv().unwrap();
        client.expire(first);
        let _ = expired.send(());
        post(client, first.next(), 4).unwrap();
    });
    server.join();
}

#[test]
fn c15_hanging_up_ends_the_connection_under_who_waits() {
    let (reading, read_now) = channel();
    let (client, server) = opened(patient(), move |peer| {
        peer.expect(Command::RegionRead);
        reading.send(()).unwrap();
        peer.expect_hang_up();
    });
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| read(&client, 0));
        read_now.recv().unwrap();
        client.hang_up();
        assert!(waiting.join().unwrap().is_err());
    });
    // The server saw it, although the client is still held.
    server.join();
    assert_eq!(client.broken(), Some(Broken::HungUp));
    assert!(read(&client, 0).is_err());
    assert!(client.reset().is_err());
    client.hang_up();
}
