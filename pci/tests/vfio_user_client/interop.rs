//! The normal path, against the server of the `vfio_user` crate, which nobody here wrote.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use failstop_pci::id::Generation;
use failstop_pci::transport::vfio_user::Client;
use failstop_pci::transport::{
    Iova, IrqIndex, Kind, MapError, RegionIndex, Strength, Transport, Unmapped,
};
use nix::sys::eventfd::EventFd;
use vfio_user::{
    DmaMapFlags, DmaUnmapFlags, IrqInfo, Server, ServerBackend, ServerRegion, SparseArea,
};

use crate::support::{Page, memory_file, patient};

const NOW: Generation = Generation::FIRST;
const BAR0: RegionIndex = RegionIndex::Bar(0);

/// What reached the other process's device.
#[derive(Debug, PartialEq)]
enum Event {
    Write(u32, u64, Vec<u8>),
    Map(DmaMapFlags, u64, u64, u64),
    Unmap(u64, u64),
    Reset,
    Irqs(u32, u32, u32, u32, usize),
}

struct Backend {
    events: Sender<Event>,
    /// Descriptors that came with the last `set_irqs` or `dma_map`.
    files: Arc<Mutex<Vec<File>>>,
    refuse: bool,
}

impl Backend {
    fn event(&self, event: Event) -> io::Result<()> {
        let _ = self.events.send(event);
        if self.refuse {
            return Err(io::Error::other("as the test wants"));
        }
        Ok(())
    }
}

impl ServerBackend for Backend {
    fn region_read(&mut self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        for (n, byte) in data.iter_mut().enumerate() {
            *byte = (region as u8) ^ (offset as u8).wrapping_add(n as u8);
        }
        Ok(())
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.event(Event::Write(region, offset, data.to_vec()))
    }

    fn dma_map(
        &mut self,
        flags: DmaMapFlags,
        offset: u64,
        address: u64,
        size: u64,
        fd: Option<File>,
    ) -> io::Result<()> {
        *self.files.lock().unwrap() = fd.into_iter().collect();
        self.event(Event::Map(flags, offset, address, size))
    }

    fn dma_unmap(&mut self, _: DmaUnmapFlags, address: u64, size: u64) -> io::Result<()> {
        self.event(Event::Unmap(address, size))
    }

    fn reset(&mut self) -> io::Result<()> {
        self.event(Event::Reset)
    }

    fn set_irqs(
        &mut self,
        index: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: Vec<File>,
    ) -> io::Result<()> {
        let event = Event::Irqs(index, flags, start, count, fds.len());
        self.files.lock().unwrap().extend(fds);
        self.event(event)
    }
}

struct Judge {
    client: Arc<Client>,
    events: Receiver<Event>,
    files: Arc<Mutex<Vec<File>>>,
    bar: File,
    _folder: tempfile::TempDir,
}

impl Judge {
    fn next(&self) -> Event {
        self.events
            .recv_timeout(std::time::Duration::from_secs(5))
            .unwrap()
    }
}

fn judge(refuse: bool) -> Judge {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("judge.sock");
    let bar = memory_file(0x5000);
    let server = Server::new(&path, true, irqs(), regions(&bar)).unwrap();
    let (sender, events) = channel();
    let files = Arc::default();
    let mut backend = Backend {
        events: sender,
        files: Arc::clone(&files),
        refuse,
    };
    let held = bar.try_clone().unwrap();
    std::thread::spawn(move || {
        let _held = held;
        server.run(&mut backend)
    });
    Judge {
        client: Client::connect(&path, patient()).unwrap(),
        events,
        files,
        bar,
        _folder: folder,
    }
}

fn irqs() -> Vec<IrqInfo> {
    (0..5)
        .map(|index| IrqInfo {
            index,
            flags: 1,
            count: if index == 2 { 10 } else { 1 },
        })
        .collect()
}

/// BAR 0 has a mappable page at 0x1000 and one at 0x3000; its file begins at 0x1000.
fn regions(bar: &File) -> Vec<ServerRegion> {
    let area = |offset| {
        let mut area = SparseArea {
            area: Default::default(),
        };
        area.area.offset = offset;
        area.area.size = 0x1000;
        area
    };
    (0..9)
        .map(|index| {
            let mut region = ServerRegion {
                region_info: Default::default(),
                sparse_areas: Vec::new(),
                mmap_fd: None,
            };
            region.region_info.argsz = 32;
            region.region_info.index = index;
            region.region_info.flags = 3;
            match index {
                0 => {
                    region.region_info.size = 0x4000;
                    region.region_info.flags = 7;
                    region.region_info.offset = 0x1000;
                    region.sparse_areas = vec![area(0x1000), area(0x3000)];
                    region.mmap_fd = Some(bar.as_raw_fd());
                }
                7 => region.region_info.size = 4096,
                _ => {}
            }
            region
        })
        .collect()
}

#[test]
fn judge_describes_itself() {
    let judge = judge(false);
    let client = &judge.client;
    assert_eq!(client.kind(), Kind::VfioUser);
    assert_eq!(client.strength(), Strength::ServerWord);
    assert!(client.name().starts_with("vfio-user:/"));
    assert_eq!(client.server_pid(), Some(std::process::id() as i32));
    assert_eq!(client.region(BAR0).size, 0x4000);
    assert_eq!(client.region(RegionIndex::Config).size, 4096);
    assert_eq!(client.region(RegionIndex::Bar(3)).size, 0);
    assert_eq!(client.irq_count(IrqIndex::Msix), 10);
}

#[test]
fn judge_answers_reads_of_every_width() {
    let judge = judge(false);
    let mut data = [0; 8];
    for len in [1, 2, 4, 8] {
        judge
            .client
            .read(NOW, BAR0, 0x10, &mut data[..len])
            .unwrap();
    }
    assert_eq!(data, [0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17]);
}

#[test]
fn judge_answers_config_reads() {
    let judge = judge(false);
    let mut data = [0; 2];
    judge
        .client
        .read(NOW, RegionIndex::Config, 4, &mut data)
        .unwrap();
    assert_eq!(data, [7 ^ 4, 7 ^ 5]);
}

#[test]
fn judge_sees_writes_and_posted_writes_in_order() {
    let judge = judge(false);
    let client = &judge.client;
    client.post(NOW, BAR0, 0x18, &[1, 2, 3, 4]).unwrap();
    client.write(NOW, BAR0, 0x20, &[5, 6, 7, 8]).unwrap();
    assert_eq!(judge.next(), Event::Write(0, 0x18, vec![1, 2, 3, 4]));
    assert_eq!(judge.next(), Event::Write(0, 0x20, vec![5, 6, 7, 8]));
}

#[test]
fn judge_maps_and_unmaps() {
    let judge = judge(false);
    let page = Page::sealed();
    judge
        .client
        .dma_map(Iova(0x10_0000), page.memory())
        .unwrap();
    let unmapped = judge.client.dma_unmap(Iova(0x10_0000), Page::LEN);
    assert_eq!(
        judge.next(),
        Event::Map(DmaMapFlags::READ_WRITE, 0, 0x10_0000, 4096)
    );
    assert_eq!(judge.next(), Event::Unmap(0x10_0000, 4096));
    assert_eq!(unmapped, Unmapped::Exact);
}

#[test]
fn judge_writes_memory_that_was_mapped() {
    let judge = judge(false);
    let page = Page::sealed();
    judge.client.dma_map(Iova(0), page.memory()).unwrap();
    let file = judge.files.lock().unwrap().pop().unwrap();
    file.write_at(&[0xa5], 0).unwrap();
    assert_eq!(page.first_byte(), 0xa5);
}

#[test]
fn judge_that_refuses_without_errno_unmaps_nothing() {
    let judge = judge(true);
    let unmapped = judge.client.dma_unmap(Iova(0x1000), 4096);
    assert_eq!(unmapped, Unmapped::Failed(nix::errno::Errno::EIO));
}

#[test]
fn judge_that_refuses_without_errno_maps_nothing() {
    let judge = judge(true);
    let page = Page::sealed();
    let result = judge.client.dma_map(Iova(0x1000), page.memory());
    assert!(matches!(result, Err(MapError::Failed { .. })));
}

#[test]
fn judge_that_refuses_a_reset_is_heard() {
    assert!(judge(true).client.reset().is_err());
}

#[test]
fn judge_resets() {
    let judge = judge(false);
    judge.client.reset().unwrap();
    assert_eq!(judge.next(), Event::Reset);
}

#[test]
fn judge_takes_one_eventfd_a_message_and_signals_it() {
    let judge = judge(false);
    let events: Vec<EventFd> = (0..2).map(|_| EventFd::new().unwrap()).collect();
    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    judge.client.set_irqs(IrqIndex::Msix, 3, &fds).unwrap();
    // DATA_EVENTFD and ACTION_TRIGGER; the judge's max_msg_fds is 1.
    assert_eq!(judge.next(), Event::Irqs(2, 0x24, 3, 1, 1));
    assert_eq!(judge.next(), Event::Irqs(2, 0x24, 4, 1, 1));

    let second = OwnedFd::from(judge.files.lock().unwrap().remove(1));
    nix::unistd::write(&second, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(events[1].read(), Ok(1));
}

#[test]
fn judge_disables_a_kind_by_count_zero() {
    let judge = judge(false);
    judge.client.set_irqs(IrqIndex::Msix, 0, &[]).unwrap();
    // DATA_NONE and ACTION_TRIGGER.
    assert_eq!(judge.next(), Event::Irqs(2, 0x21, 0, 0, 0));
}

#[test]
fn judge_shares_the_pages_that_it_says_are_mappable() {
    let judge = judge(false);
    judge.bar.write_at(b"reg", 0x4010).unwrap();

    let mappable = judge.client.region(BAR0).mappable;
    let (file, at) = judge.client.region_file(BAR0, 0x3000).unwrap();

    assert_eq!(mappable, [(0x1000, 0x1000), (0x3000, 0x1000)]);
    let mut bytes = [0; 3];
    File::from(file).read_at(&mut bytes, at + 0x10).unwrap();
    assert_eq!(&bytes, b"reg");
    assert!(judge.client.region_file(BAR0, 0x2000).is_err());
}

#[test]
fn judge_serves_a_client_that_was_given_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("passed.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let bar = memory_file(0x5000);
    let server = Server::from_owned_fd(listener.into(), true, irqs(), regions(&bar));
    let (sender, _events) = channel();
    let mut backend = Backend {
        events: sender,
        files: Arc::default(),
        refuse: false,
    };
    let thread = std::thread::spawn(move || {
        let _bar = bar;
        server.run(&mut backend).unwrap();
    });
    let socket = UnixStream::connect(&path).unwrap();

    let client = Client::from_socket(socket.into(), "passed", patient()).unwrap();
    client.reset().unwrap();
    drop(client);

    thread.join().unwrap();
}
