//! A prompt on disk, as `quantmoe generate --save-state` writes it: a safetensors file of tokens and what a cache has of them
//! (docs/reference/exported-folder.md, "Saved prompts").

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ort::value::DynTensor;
use serde_json::{Map, Value};

use crate::cache_input::CacheInput;
use crate::Error;

/// Copies of the states by the number of tokens that they are of: where a cache can go back to.
pub(crate) type States = BTreeMap<usize, Vec<Vec<u8>>>;

/// A file that was opened and checked.
pub(crate) struct SavedCache<'a> {
    path: &'a Path,
    bytes: Vec<u8>,
    entries: Map<String, Value>, // those that were not taken
    first: usize,                // byte of the tensors
    pub tokens: Vec<i64>,
}

impl<'a> SavedCache<'a> {
    pub fn open(path: &'a Path, identity: &str) -> Result<Self, Error> {
        let bytes = fs::read(path).map_err(|error| Error::file(path, error))?;
        let (mut entries, first) = read_header(&bytes[..], bytes.len() as u64, path)?;
        entries.remove("__metadata__");
        let mut file = Self { path, bytes, entries, first, tokens: Vec::new() };
        let model = file.take("model", "U8", None)?;
        if file.bytes[model] != *identity.as_bytes() {
            return Err(file.wrong("saved with another model: its identity is another"));
        }
        if !file.entries.contains_key("checksum") {
            return Err(file.wrong("checksum is missing: save it again"));
        }
        let checksum = file.take("checksum", "U32", Some(vec![1]))?;
        if checksum.end != file.bytes.len() {
            return Err(file.wrong("checksum is not its last tensor"));
        }
        if file.bytes[checksum.clone()] != crc32(0, &file.bytes[..checksum.start]).to_le_bytes() {
            return Err(file.wrong("was altered or is damaged: its bytes have another CRC-32 than its checksum says"));
        }
        let tokens = file.take("tokens", "I64", None)?;
        let numbers = file.bytes[tokens].chunks_exact(8);
        file.tokens = numbers.map(|number| i64::from_le_bytes(number.try_into().expect("eight bytes"))).collect();
        Ok(file)
    }

    /// Put keys and values of all tokens into tensors.
    pub fn load(&mut self, input: &CacheInput, value: &mut DynTensor) -> Result<(), Error> {
        let length = self.tokens.len();
        let found = self.take(&input.name, input.dtype, Some(input.saved(length)))?;
        let (begins, bytes) = input.pieces(value, length);
        let tensor = input.bytes(value);
        for (piece, begin) in self.bytes[found].chunks_exact(bytes.max(1)).zip(begins) {
            tensor[begin..begin + bytes].copy_from_slice(piece);
        }
        Ok(())
    }

    /// Take the states after each number of tokens that the file has. Nothing else may be left.
    pub fn load_states(mut self, inputs: &[CacheInput]) -> Result<States, Error> {
        let mut states = States::new();
        let ends = self.entries.keys().filter_map(|name| name.split_once('@')?.1.parse().ok());
        let ends: std::collections::BTreeSet<usize> = ends.collect();
        for end in ends {
            let mut found = Vec::new();
            for input in inputs.iter().filter(|input| input.is_state) {
                let range = self.take(&format!("{}@{end}", input.name), input.dtype, Some(input.saved(0)))?;
                found.push(self.bytes[range].to_vec());
            }
            states.insert(end, found);
        }
        if let Some(name) = self.entries.keys().next() {
            return Err(self.wrong(&format!("{name} is not of this model's cache")));
        }
        let length = self.tokens.len();
        if inputs.iter().any(|input| input.is_state) && states.keys().next_back() != Some(&length) {
            let ends: Vec<_> = states.keys().collect();
            return Err(self.wrong(&format!("expected states after its {length} tokens, found those after {ends:?}")));
        }
        Ok(states)
    }

    fn wrong(&self, text: &str) -> Error {
        Error::Invalid(format!("{}: {text}", self.path.display()))
    }

    /// Take a tensor out of the header, and return where its bytes are. Without a shape it is a row.
    fn take(&mut self, name: &str, dtype: &str, shape: Option<Vec<i64>>) -> Result<Range<usize>, Error> {
        let Some(entry) = self.entries.remove(name) else {
            return Err(self.wrong(&format!("{name} is missing")));
        };
        let numbers =
            |field: &str| -> Option<Vec<i64>> { entry[field].as_array()?.iter().map(Value::as_i64).collect() };
        let (found, offsets) = (numbers("shape").unwrap_or_default(), numbers("data_offsets").unwrap_or_default());
        let size = self.bytes.len() - self.first;
        let range = match offsets[..] {
            [begin, end] if 0 <= begin && begin <= end && end <= size as i64 => begin as usize..end as usize,
            _ => {
                return Err(self.wrong(&format!(
                    "{name}: data_offsets {offsets:?} in a file of {} bytes; is it truncated?",
                    self.bytes.len()
                )))
            }
        };
        let width = match dtype {
            "I64" => 8,
            "F32" | "U32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let shape = shape.unwrap_or_else(|| vec![(range.len() / width) as i64]);
        if entry["dtype"] != dtype || found != shape || shape.iter().product::<i64>() as usize * width != range.len() {
            return Err(self.wrong(&format!(
                "{name} is {} {found:?}, expected {dtype} {shape:?} of this model",
                entry["dtype"].as_str().unwrap_or("?")
            )));
        }
        Ok(self.first + range.start..self.first + range.end)
    }
}

/// Read the header of a safetensors file of so many bytes. Return it, and the place of the tensors.
fn read_header(mut file: impl Read, size: u64, path: &Path) -> Result<(Map<String, Value>, usize), Error> {
    let wrong = |text: String| Error::Invalid(format!("{}: {text}", path.display()));
    if size < 8 {
        return Err(wrong(format!("{size} bytes, expected a safetensors file")));
    }
    let mut begin = [0; 8];
    file.read_exact(&mut begin).map_err(|error| Error::file(path, error))?;
    let length = u64::from_le_bytes(begin);
    if length > size - 8 {
        return Err(wrong(format!("a header of {length} bytes; is the file truncated?")));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(|error| Error::file(path, error))?;
    let header = serde_json::from_slice(&text).map_err(|error| wrong(format!("corrupt header: {error}")))?;
    Ok((header, 8 + text.len()))
}

/// Whether a saver may replace what has this name: nothing, an empty file or an earlier saved state.
fn is_replaceable(path: &Path) -> Result<bool, Error> {
    let there = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
        there => there.map_err(|error| Error::file(path, error))?,
    };
    if !there.is_file() || there.len() == 0 {
        return Ok(there.is_file());
    }
    let file = File::open(path).map_err(|error| Error::file(path, error))?;
    match read_header(file, there.len(), path) {
        Ok((header, _)) => Ok(["model", "tokens"].iter().all(|&name| header.contains_key(name))),
        Err(Error::Invalid(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Write the cache of these tokens, and the states. The file has its name when all is there.
pub(crate) fn save<'a>(
    path: &Path,
    identity: &str,
    tokens: &[i64],
    keys_and_values: impl Iterator<Item = (&'a CacheInput, &'a mut DynTensor)>,
    inputs: &[CacheInput],
    states: &States,
) -> Result<(), Error> {
    let mut header = Map::new();
    let mut data = Vec::new();
    let mut add = |name: String, dtype: &str, shape: Vec<i64>, bytes: &[u8]| {
        let begin = data.len();
        data.extend_from_slice(bytes);
        let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] });
        header.insert(name, entry);
    };
    add("model".into(), "U8", vec![identity.len() as i64], identity.as_bytes());
    let ids: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    add("tokens".into(), "I64", vec![tokens.len() as i64], &ids);
    for (input, value) in keys_and_values {
        let (begins, bytes) = input.pieces(value, tokens.len());
        let tensor = input.bytes(value);
        let pieces: Vec<u8> = begins.iter().flat_map(|&begin| &tensor[begin..begin + bytes]).copied().collect();
        add(input.name.clone(), input.dtype, input.saved(tokens.len()), &pieces);
    }
    for (end, found) in states {
        for (input, state) in inputs.iter().filter(|input| input.is_state).zip(found) {
            add(format!("{}@{end}", input.name), input.dtype, input.saved(0), state);
        }
    }
    add("checksum".into(), "U32", vec![1], &[]);
    let end = data.len();
    header["checksum"]["data_offsets"] = serde_json::json!([end, end + 4]);
    let mut text = serde_json::to_string(&header).expect("names and numbers");
    text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
    let size = (text.len() as u64).to_le_bytes();
    let checksum = [&size[..], text.as_bytes(), &data].iter().fold(0, |crc, part| crc32(crc, part));

    // A link stays a link, and savers of one path each write a file of their own.
    let target = if path.is_symlink() { fs::canonicalize(path) } else { Ok(path.to_owned()) };
    let target = target.map_err(|error| Error::file(path, error))?;
    if !is_replaceable(&target)? {
        let text = "is there, and is no saved state: expected an earlier one, or no file";
        return Err(Error::file(path, io::Error::new(io::ErrorKind::AlreadyExists, text)));
    }
    let mut partial = target.clone().into_os_string();
    partial.push(format!(".{:016x}.partial", RandomState::new().hash_one(0)));
    let partial = PathBuf::from(partial);
    let written = || -> io::Result<()> {
        let mut file = File::create_new(&partial)?;
        for part in [&size[..], text.as_bytes(), &data, &checksum.to_le_bytes()] {
            file.write_all(part)?;
        }
        drop(file);
        fs::rename(&partial, &target)
    };
    written().map_err(|error| {
        let _ = fs::remove_file(&partial);
        Error::file(path, error)
    })
}

/// Return zlib's CRC-32 of bytes after others that have `crc`, 0 of none. Eight at a time: the tables have what a byte so many
/// places before the last adds.
fn crc32(crc: u32, bytes: &[u8]) -> u32 {
    static TABLES: [[u32; 256]; 8] = tables();
    let mut crc = !crc;
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let word = u64::from_le_bytes(*word) ^ u64::from(crc);
        crc = (0..8).fold(0, |crc, i| crc ^ TABLES[7 - i][(word >> (8 * i)) as usize & 255]);
    }
    !rest.iter().fold(crc, |crc, &byte| crc >> 8 ^ TABLES[0][(crc as u8 ^ byte) as usize])
}

const fn tables() -> [[u32; 256]; 8] {
    let mut made = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 8 * 256 {
        let (place, byte) = (i / 256, i % 256);
        let mut crc = if place == 0 { byte as u32 } else { made[place - 1][byte] };
        let mut bit = 0;
        while bit < 8 {
            crc = crc >> 1 ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 };
            bit += 1;
        }
        made[place][byte] = crc;
        i += 1;
    }
    made
}
