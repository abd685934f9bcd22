//! DMA memory: what is handed to a server, and what its answers are worth.

use std::fs::File;

use failstop_pci::transport::vfio_user::Client;
use failstop_pci::transport::vfio_user::wire::{Capabilities, Command, DmaMap, DmaUnmap};
use failstop_pci::transport::{Iova, MapError, Transport, Unmapped};
use nix::errno::Errno;
use zerocopy::IntoBytes;

use crate::support::{Page, Peer, Received, impatient, opened, opening, patient};

const IOVA: Iova = Iova(0x40_0000);

/// What a client makes of an unmap that the server answers as `answer` says.
fn unmapped_by(answer: impl FnOnce(&Peer, Received) + Send + 'static) -> (Unmapped, bool) {
    let (client, server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::DmaUnmap);
        answer(&peer, asked);
        peer.receive();
    });
    let unmapped = client.dma_unmap(IOVA, 0x2000);
    let alive = client.broken().is_none();
    drop(client);
    server.join();
    (unmapped, alive)
}

/// What a client makes of a map that the server refuses with `errno`.
fn map_refused_with(errno: i32) -> MapError {
    let (client, _server) = opened(patient(), move |peer| {
        let asked = peer.expect(Command::DmaMap);
        peer.fail(&asked, errno as u32);
        peer.receive();
    });
    client.dma_map(IOVA, Page::sealed().memory()).unwrap_err()
}

fn entries_left(client: &Client) -> Option<u32> {
    client.dma_limits().unwrap().entries_left
}

#[test]
fn c46_server_cannot_truncate_the_memory_that_it_is_given() {
    let (client, server) = opened(patient(), |peer| {
        let asked = peer.expect(Command::DmaMap);
        let map: DmaMap = asked.body();
        let file = File::from(asked.fds.into_iter().next().unwrap());
        let shrunk = nix::unistd::ftruncate(&file, 0);
        let grown = nix::unistd::ftruncate(&file, 2 * Page::LEN as i64);
        assert_eq!((shrunk, grown), (Err(Errno::EPERM), Err(Errno::EPERM)));
        assert_eq!((map.address, map.size), (IOVA.0, Page::LEN));
        peer.send(&asked.header.reply(0), &[], &[]);
        peer.receive();
    });
    let page = Page::sealed();
    client.dma_map(IOVA, page.memory()).unwrap();
    assert_eq!(page.first_byte(), 0);
    drop(client);
    server.join();
}

#[test]
fn c46_memory_that_is_not_sealed_is_not_sent() {
    let (client, server) = opened(patient(), |peer| peer.expect_hang_up());
    let error = client.dma_map(IOVA, Page::unsealed().memory()).unwrap_err();
    assert!(matches!(error, MapError::Failed { .. }));
    drop(client);
    server.join();
}

#[test]
fn map_beyond_the_address_space_is_not_sent() {
    let (client, server) = opened(patient(), |peer| peer.expect_hang_up());
    let page = Page::sealed();
    for iova in [Iova(1 << 48), Iova(u64::MAX - 0xfff)] {
        assert!(client.dma_map(iova, page.memory()).is_err());
    }
    drop(client);
    server.join();
}

#[test]
fn map_over_a_map_exists() {
    assert!(matches!(
        map_refused_with(libc::EEXIST),
        MapError::Exists { .. }
    ));
}

#[test]
fn map_without_room_is_one_too_many() {
    assert!(matches!(
        map_refused_with(libc::ENOSPC),
        MapError::TooMany { .. }
    ));
}

#[test]
fn map_refused_without_errno_fails() {
    assert!(matches!(map_refused_with(0), MapError::Failed { .. }));
}

#[test]
fn map_that_nobody_answered_is_not_called_unmapped() {
    let (client, _server) = opened(patient(), |peer| {
        peer.expect(Command::DmaMap);
    });
    let error = client.dma_map(IOVA, Page::sealed().memory()).unwrap_err();
    assert!(matches!(error, MapError::Unanswered { .. }));
}

#[test]
fn map_on_a_dead_connection_fails_and_nothing_was_sent() {
    let (client, server) = opened(impatient(), |peer| {
        peer.expect(Command::DmaUnmap);
        peer.expect_hang_up();
    });
    assert_ne!(client.dma_unmap(IOVA, 0x1000), Unmapped::Exact);
    let error = client.dma_map(IOVA, Page::sealed().memory()).unwrap_err();
    assert!(matches!(error, MapError::Failed { .. }));
    server.join();
}

#[test]
fn c25_mappings_left_are_counted_and_the_last_is_refused_unsent() {
    let (client, server) = opening(patient(), |peer| {
        peer.answer_opening_with(&Capabilities {
            max_dma_maps: 1,
            ..Capabilities::default()
        });
        let asked = peer.expect(Command::DmaMap);
        peer.reply(&asked, &[]);
        let asked = peer.expect(Command::DmaUnmap);
        peer.reply(&asked, &asked.payload);
        peer.expect_hang_up();
    });
    let client = client.unwrap();
    let page = Page::sealed();
    assert_eq!(entries_left(&client), Some(1));
    client.dma_map(IOVA, page.memory()).unwrap();
    assert_eq!(entries_left(&client), Some(0));
    let error = client.dma_map(Iova(0), page.memory()).unwrap_err();
    assert!(matches!(error, MapError::TooMany { .. }));
    assert_eq!(client.dma_unmap(IOVA, Page::LEN), Unmapped::Exact);
    assert_eq!(entries_left(&client), Some(1));
    drop(client);
    server.join();
}

#[test]
fn page_size_is_the_smallest_that_the_server_names() {
    let (client, _server) = opening(patient(), |peer| {
        peer.answer_opening_with(&Capabilities {
            pgsizes: 0x20_0000 | 0x1_0000,
            ..Capabilities::default()
        });
        peer.receive();
    });
    assert_eq!(client.unwrap().dma_limits().unwrap().page_size, 0x1_0000);
}

#[test]
fn unmap_that_is_repeated_word_for_word_is_exact() {
    let result = unmapped_by(|peer, asked| peer.reply(&asked, &asked.payload));
    assert_eq!(result, (Unmapped::Exact, true));
}

#[test]
fn c6_unmap_of_another_size_is_not_success() {
    let result = unmapped_by(|peer, asked| {
        let mut unmap: DmaUnmap = asked.body();
        unmap.size = 0x1000;
        peer.reply(&asked, unmap.as_bytes());
    });
    assert_eq!(result, (Unmapped::Partial { bytes: 0x1000 }, true));
}

#[test]
fn c6_unmap_of_nothing_is_absent() {
    let result = unmapped_by(|peer, asked| {
        let mut unmap: DmaUnmap = asked.body();
        unmap.size = 0;
        peer.reply(&asked, unmap.as_bytes());
    });
    assert_eq!(result, (Unmapped::Absent, true));
}

#[test]
fn unmap_of_another_address_breaks_the_connection() {
    let result = unmapped_by(|peer, asked| {
        let mut unmap: DmaUnmap = asked.body();
        unmap.address += 0x1000;
        peer.reply(&asked, unmap.as_bytes());
    });
    assert_eq!(result, (Unmapped::Failed(Errno::EPROTO), false));
}

#[test]
fn unmap_answered_by_a_bare_header_breaks_the_connection() {
    let result = unmapped_by(|peer, asked| peer.reply(&asked, &[]));
    assert_eq!(result, (Unmapped::Failed(Errno::EPROTO), false));
}

#[test]
fn unmap_refused_with_enoent_is_absent() {
    let result = unmapped_by(|peer, asked| peer.fail(&asked, libc::ENOENT as u32));
    assert_eq!(result, (Unmapped::Absent, true));
}

#[test]
fn unmap_refused_with_ebusy_is_busy() {
    let result = unmapped_by(|peer, asked| peer.fail(&asked, libc::EBUSY as u32));
    assert_eq!(result, (Unmapped::Busy, true));
}

#[test]
fn unmap_refused_with_einval_failed() {
    let result = unmapped_by(|peer, asked| peer.fail(&asked, libc::EINVAL as u32));
    assert_eq!(result, (Unmapped::Failed(Errno::EINVAL), true));
}

#[test]
fn unmap_refused_without_errno_failed() {
    let result = unmapped_by(|peer, asked| peer.fail(&asked, 0));
    assert_eq!(result, (Unmapped::Failed(Errno::EIO), true));
}

#[test]
fn c5_unmap_that_the_server_dies_in_failed() {
    let (client, _server) = opened(patient(), |peer| {
        peer.expect(Command::DmaUnmap);
    });
    let unmapped = client.dma_unmap(IOVA, 0x2000);
    assert_eq!(unmapped, Unmapped::Failed(Errno::ECONNRESET));
}

#[test]
fn c5_unmap_that_the_server_does_not_answer_failed() {
    let (client, server) = opened(impatient(), |peer| {
        peer.expect(Command::DmaUnmap);
        peer.expect_hang_up();
    });
    let unmapped = client.dma_unmap(IOVA, 0x2000);
    assert_eq!(unmapped, Unmapped::Failed(Errno::ETIMEDOUT));
    server.join();
}

#[test]
fn c5_unmap_on_a_dead_connection_failed() {
    let (client, _server) = opened(patient(), drop);
    client.reset().unwrap_err();
    assert!(matches!(
        client.dma_unmap(IOVA, 0x2000),
        Unmapped::Failed(_)
    ));
}
