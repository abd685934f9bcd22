//! What the host and the agent in a guest say to each other.
//!
//! They talk over a virtio-serial port of their own, so nothing that the kernel prints on the console can be taken for
//! an answer. A message is a frame: a fixed header (two magic bytes, the kind, the number of the command it belongs to,
//! the payload's length; little-endian) and then the payload. Output of commands travels as raw bytes, all else as JSON.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// The name of the virtio-serial port.
pub const PORT: &str = "failstop.agent";

/// The largest payload that either side accepts.
pub const MAX_PAYLOAD: usize = 64 << 20;

const MAGIC: [u8; 2] = *b"FS";
const HEADER: usize = 11;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Guest to host: the agent is up. Payload: [`Ready`].
    Ready = 1,
    /// Host to guest: run a command. Payload: [`Run`].
    Run = 2,
    /// Guest to host: bytes that a command wrote to its standard output.
    Stdout = 3,
    /// Guest to host: bytes that a command wrote to its standard error.
    Stderr = 4,
    /// Guest to host: a command is over. Payload: [`Exit`].
    Exit = 5,
    /// Host to guest: kill the process group of a command.
    Kill = 6,
    /// Host to guest: create a file. Payload: [`Put`] as one line of JSON, then the contents. Answered by [`Kind::Exit`].
    Put = 7,
    /// Host to guest: send the kernel's log. Answered by one [`Kind::Stdout`] with its records, then [`Kind::Exit`].
    KernelLog = 8,
    /// Host to guest: switch the machine off. Not answered.
    PowerOff = 9,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Ready,
            2 => Self::Run,
            3 => Self::Stdout,
            4 => Self::Stderr,
            5 => Self::Exit,
            6 => Self::Kill,
            7 => Self::Put,
            8 => Self::KernelLog,
            9 => Self::PowerOff,
            _ => return None,
        })
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// The command that it belongs to; zero where there is none.
    pub id: u32,
    /// The rest.
    pub payload: Vec<u8>,
}

impl Frame {
    /// A frame that carries `value` as JSON.
    ///
    /// # Panics
    ///
    /// If `value` has no JSON form; the types of this module all have one.
    pub fn json<T: Serialize>(kind: Kind, id: u32, value: &T) -> Self {
        let payload = serde_json::to_vec(value).expect("protocol types have a JSON form");
        Self { kind, id, payload }
    }

    /// The payload, read as JSON.
    ///
    /// # Errors
    ///
    /// `InvalidData` when it is no JSON of that shape.
    pub fn parse<'a, T: Deserialize<'a>>(&'a self) -> io::Result<T> {
        serde_json::from_slice(&self.payload)
            .map_err(|error| invalid(format!("{:?} frame: {error}", self.kind)))
    }

    /// Writes the frame in one piece.
    ///
    /// # Errors
    ///
    /// What the writer says; `InvalidData` for a payload above [`MAX_PAYLOAD`].
    pub fn write(&self, writer: &mut impl Write) -> io::Result<()> {
        let length = u32::try_from(self.payload.len())
            .ok()
            .filter(|&length| length as usize <= MAX_PAYLOAD);
        let length = length.ok_or_else(|| {
            invalid(format!(
                "a payload of {} bytes is too long",
                self.payload.len()
            ))
        })?;
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len());
        bytes.extend(MAGIC);
        bytes.push(self.kind as u8);
        bytes.extend(self.id.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        bytes.extend(&self.payload);
        writer.write_all(&bytes)?;
        writer.flush()
    }

    /// Reads one frame; `None` at a clean end of the stream.
    ///
    /// # Errors
    ///
    /// What the reader says; `UnexpectedEof` inside a frame; `InvalidData` for bytes that are no frame.
    pub fn read(reader: &mut impl Read) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER];
        match reader.read(&mut header[..1])? {
            0 => return Ok(None),
            _ => reader.read_exact(&mut header[1..])?,
        }
        let [m0, m1, kind, i0, i1, i2, i3, l0, l1, l2, l3] = header;
        if [m0, m1] != MAGIC {
            return Err(invalid(format!("a frame begins with {m0:#04x} {m1:#04x}")));
        }
        let kind =
            Kind::from_byte(kind).ok_or_else(|| invalid(format!("unknown frame kind {kind}")))?;
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        if length > MAX_PAYLOAD {
            return Err(invalid(format!("a payload of {length} bytes is too long")));
        }
        let mut payload = vec![0; length];
        reader.read_exact(&mut payload)?;
        Ok(Some(Self {
            kind,
            id: u32::from_le_bytes([i0, i1, i2, i3]),
            payload,
        }))
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// The agent's greeting.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ready {
    /// The kernel's release, as in `uname -r`.
    pub kernel: String,
    /// Seconds since the kernel started.
    pub uptime: f64,
    /// What went wrong on the way up without being fatal, such as a module that would not load.
    pub complaints: Vec<String>,
    /// The functions that the kernel found.
    pub functions: Vec<Function>,
}

/// A PCI function as the guest's kernel sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Its address, `0000:01:00.0`.
    pub address: String,
    /// Its vendor's id, `0x8086`.
    pub vendor: String,
    /// Its device id.
    pub device: String,
    /// The addresses of all functions of its IOMMU group, its own included; none where there is no group.
    pub group: Vec<String>,
}

/// A command for the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The program and its arguments. Programs are found by `PATH`, which begins with the folder of the files sent along.
    pub argv: Vec<String>,
    /// Environment variables besides those of the guest.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The process group is killed after this many milliseconds; never, when zero.
    #[serde(default)]
    pub timeout_ms: u64,
    /// Run as this user and group instead of root, with no capabilities and no other groups.
    #[serde(default)]
    pub user: Option<u32>,
    /// RLIMIT_MEMLOCK in bytes, soft and hard.
    #[serde(default)]
    pub memlock: Option<u64>,
}

impl Run {
    /// A command with these words, as root, with a minute to finish.
    pub fn new<S: Into<String>>(argv: impl IntoIterator<Item = S>) -> Self {
        Self {
            argv: argv.into_iter().map(Into::into).collect(),
            timeout_ms: 60_000,
            ..Self::default()
        }
    }

    /// A line for the guest's shell.
    pub fn shell(line: impl Into<String>) -> Self {
        Self::new(["sh".into(), "-c".into(), line.into()])
    }

    /// With another time limit.
    pub fn timeout(mut self, limit: std::time::Duration) -> Self {
        self.timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self
    }

    /// With an environment variable.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// As an ordinary user, with a limit on locked memory where one is given.
    pub fn user(mut self, id: u32, memlock: Option<u64>) -> Self {
        (self.user, self.memlock) = (Some(id), memlock);
        self
    }
}

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Its exit code, if it exited.
    pub code: Option<i32>,
    /// The signal that killed it, if one did.
    pub signal: Option<i32>,
    /// Its time was up, and it was killed.
    pub timed_out: bool,
    /// It did not go away when killed: it sleeps in the kernel.
    pub stuck: bool,
    /// Why it never started.
    pub error: Option<String>,
    /// How long it ran.
    pub milliseconds: u64,
}

/// A file for the guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Put {
    /// Where to, absolute.
    pub path: String,
    /// Its permission bits.
    pub mode: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(frame: &Frame) -> Vec<u8> {
        let mut bytes = Vec::new();
        frame.write(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn frame_has_the_documented_bytes() {
        let frame = Frame {
            kind: Kind::Stdout,
            id: 0x0102,
            payload: b"hi".to_vec(),
        };
        assert_eq!(bytes(&frame), b"FS\x03\x02\x01\0\0\x02\0\0\0hi");
    }

    #[test]
    fn frames_survive_a_reader_that_gives_one_byte_at_a_time() {
        struct Trickle<'a>(&'a [u8]);
        impl Read for Trickle<'_> {
            fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
                let end = buffer.len().min(1);
                self.0.read(&mut buffer[..end])
            }
        }
        let first = Frame::json(Kind::Run, 7, &Run::shell("echo FS"));
        let second = Frame {
            kind: Kind::PowerOff,
            id: 0,
            payload: Vec::new(),
        };
        let stream = [bytes(&first), bytes(&second)].concat();
        let mut reader = Trickle(&stream);
        assert_eq!(Frame::read(&mut reader).unwrap(), Some(first));
        assert_eq!(Frame::read(&mut reader).unwrap(), Some(second));
        assert_eq!(Frame::read(&mut reader).unwrap(), None);
    }

    #[test]
    fn a_frame_cut_short_is_an_error_not_an_end() {
        let frame = bytes(&Frame {
            kind: Kind::Stderr,
            id: 1,
            payload: vec![1, 2, 3],
        });
        let error = Frame::read(&mut &frame[..frame.len() - 1]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn console_noise_and_absurd_lengths_are_refused() {
        let noise = Frame::read(&mut &b"[    0.000000] Linux"[..]).unwrap_err();
        assert_eq!(noise.kind(), io::ErrorKind::InvalidData);
        let long = Frame::read(&mut &b"FS\x03\0\0\0\0\xff\xff\xff\xff"[..]).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidData);
    }
}
