//! What the client mapped, and what the device reaches of it.

use super::*;
use rustix::fs::MemfdFlags;

fn memfd(pages: u64, sealed: bool) -> OwnedFd {
    let fd =
        rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, pages * PAGE).unwrap();
    if sealed {
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    }
    fd
}

const RW: u32 = 3;

fn mapped(pages: u64, sealed: bool) -> (ClientMemory, OwnedFd) {
    let fd = memfd(pages, sealed);
    let mut memory = ClientMemory::default();
    let ours = fd.try_clone().unwrap();
    memory.map(0x1000, pages * PAGE, 0, RW, Some(ours)).unwrap();
    (memory, fd)
}

#[test]
fn what_the_device_writes_the_client_reads() {
    let (mut memory, fd) = mapped(1, true);
    memory.write(0x1010, b"hello");
    let mut bytes = [0; 5];
    File::from(fd).read_exact_at(&mut bytes, 0x10).unwrap();
    assert_eq!(&bytes, b"hello");
}

#[test]
fn a_word_is_little_endian() {
    let (mut memory, _fd) = mapped(1, true);
    memory.store(0x1008, 0x0102);
    let mut bytes = [0; 2];
    memory.read(0x1008, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 1]);
    assert_eq!(memory.load(0x1008), Ok(0x0102));
}

#[test]
fn an_access_outside_is_stray_counted_and_not_performed() {
    let (mut memory, fd) = mapped(1, true);
    memory.write(0x1ffc, &[1; 8]);
    assert_eq!(memory.load(0), Err(Abort));
    let mut bytes = [0xFF; 4];
    File::from(fd).read_exact_at(&mut bytes, 0xffc).unwrap();
    assert_eq!(bytes, [0; 4]);
    let stray = memory.stray();
    assert_eq!((stray.reads, stray.writes, stray.bytes), (1, 1, 16));
    assert_eq!(stray.addresses, [0x1ffc, 0]);
}

#[test]
fn an_access_after_unmap_is_stray() {
    let (mut memory, _fd) = mapped(1, true);
    assert_eq!(memory.unmap(0x1000, PAGE), Ok(PAGE));
    memory.store(0x1000, 1);
    assert_eq!(memory.stray().writes, 1);
}

#[test]
fn an_access_that_spans_adjacent_mappings_is_whole() {
    let fd = memfd(2, true);
    let mut memory = ClientMemory::default();
    // The file's pages in reverse order, as a guest's are behind an IOMMU.
    memory
        .map(0x1000, PAGE, PAGE, RW, Some(fd.try_clone().unwrap()))
        .unwrap();
    memory
        .map(0x2000, PAGE, 0, RW, Some(fd.try_clone().unwrap()))
        .unwrap();
    memory.write(0x1ffe, &[1, 2, 3, 4]);
    let mut bytes = [0; 4];
    memory.read(0x1ffe, &mut bytes).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    let mut start = [0; 2];
    File::from(fd).read_exact_at(&mut start, 0).unwrap();
    assert_eq!(start, [3, 4]);
    assert_eq!(memory.stray().total(), 0);
}

#[test]
fn an_access_inside_one_of_several_mappings_stays_there() {
    let fd = memfd(2, true);
    let mut memory = ClientMemory::default();
    for (address, offset) in [(0x1000, 0), (0x8000, PAGE)] {
        let fd = fd.try_clone().unwrap();
        memory.map(address, PAGE, offset, RW, Some(fd)).unwrap();
    }
    memory.write(0x1ff8, &[7; 8]);
    assert_eq!(memory.load(0x8000), Ok(0));
    assert_eq!(memory.load(0x1ff8), Ok(0x0707_0707_0707_0707));
}

#[test]
fn the_last_page_of_the_address_space_can_be_mapped_and_used() {
    let mut memory = ClientMemory::default();
    let last = u64::MAX - PAGE + 1;
    memory.map(last, PAGE, 0, RW, Some(memfd(1, true))).unwrap();
    memory.store(u64::MAX - 7, 5);
    assert_eq!(memory.load(u64::MAX - 7), Ok(5));
    assert_eq!(memory.read(u64::MAX - 3, &mut [0; 8]), Err(Abort));
}

#[test]
fn a_file_is_mapped_once() {
    let fd = memfd(4, true);
    let mut memory = ClientMemory::default();
    for page in 0..4 {
        let fd = fd.try_clone().unwrap();
        memory
            .map(page * 2 * PAGE, PAGE, page * PAGE, RW, Some(fd))
            .unwrap();
    }
    assert_eq!(memory.files.len(), 1);
}

#[test]
fn an_overlap_is_refused() {
    let (mut memory, fd) = mapped(2, true);
    assert_eq!(
        memory.map(0x2000, PAGE, 0, RW, Some(fd)),
        Err(Errno::EEXIST)
    );
}

#[test]
fn a_range_beyond_the_file_is_refused() {
    let mut memory = ClientMemory::default();
    let fd = memfd(1, true);
    assert_eq!(memory.map(0, 2 * PAGE, 0, RW, Some(fd)), Err(Errno::EINVAL));
}

#[test]
fn ranges_that_make_no_sense_are_refused() {
    let mut memory = ClientMemory::default();
    for (address, size, offset, flags) in [
        (0, 0, 0, RW),
        (1, PAGE, 0, RW),
        (0, 100, 0, RW),
        (u64::MAX - PAGE + 1, 2 * PAGE, 0, RW),
        (0, PAGE, 0, 0xFF),
    ] {
        let result = memory.map(address, size, offset, flags, None);
        assert_eq!(result, Err(Errno::EINVAL), "{address:#x} {size:#x}");
    }
}

#[test]
fn something_else_than_a_file_is_refused() {
    let mut memory = ClientMemory::default();
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(
        memory.map(0, PAGE, 0, RW, Some(socket.into())),
        Err(Errno::EINVAL)
    );
}

#[test]
fn a_file_cut_short_does_not_kill_the_process() {
    let (mut memory, fd) = mapped(1, false);
    rustix::fs::ftruncate(&fd, 0).unwrap();
    assert_eq!(memory.load(0x1000), Err(Abort));
}

#[test]
fn an_unsealed_file_can_be_read_and_written() {
    let (mut memory, _fd) = mapped(1, false);
    memory.store(0x1000, 0xABCD);
    assert_eq!(memory.load(0x1000), Ok(0xABCD));
}

#[test]
fn a_mapping_without_a_descriptor_is_unreachable_not_stray() {
    let mut memory = ClientMemory::default();
    memory.map(0, PAGE, 0, RW, None).unwrap();
    assert_eq!(memory.load(0), Err(Abort));
    assert_eq!((memory.stray().unreachable, memory.stray().total()), (1, 0));
}

#[test]
fn a_write_to_a_read_only_mapping_is_stray() {
    let mut memory = ClientMemory::default();
    memory.map(0, PAGE, 0, 1, Some(memfd(1, true))).unwrap();
    memory.store(0, 1);
    assert_eq!((memory.stray().writes, memory.load(0)), (1, Ok(0)));
}

#[test]
fn unmap_takes_whole_mappings_only() {
    let (mut memory, _fd) = mapped(2, true);
    assert_eq!(memory.unmap(0x1000, PAGE), Err(Errno::EINVAL));
    assert_eq!(memory.unmap(0x8000, PAGE), Err(Errno::ENOENT));
    assert_eq!(memory.unmap(0, 0), Err(Errno::EINVAL));
    assert_eq!(memory.unmap(0, 0x10000), Ok(2 * PAGE));
}

#[test]
fn a_mapping_at_an_old_address_is_another_one() {
    let (mut memory, fd) = mapped(2, true);
    let first = memory.mapping_at(0x1000);
    assert!(first.is_some());
    assert_eq!(memory.mapping_at(0x2fff), first);
    memory.unmap(0x1000, 2 * PAGE).unwrap();
    assert_eq!(memory.mapping_at(0x1000), None);
    memory.map(0x1000, PAGE, 0, RW, Some(fd)).unwrap();
    assert!(
        memory
            .mapping_at(0x1000)
            .is_some_and(|now| Some(now) != first)
    );
    memory.clear();
    assert_eq!(memory.mapping_at(0x1000), None);
}

#[test]
fn addresses_around_a_mapping_are_not_in_it() {
    let (memory, _fd) = mapped(1, true);
    assert_eq!(
        (memory.mapping_at(0xfff), memory.mapping_at(0x2000)),
        (None, None)
    );
}
