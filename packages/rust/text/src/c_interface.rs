//! The functions of include/quantmoe/text.h.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::null_mut;
use std::sync::Arc;

use crate::{ChatTemplate, Sampler, Sampling, TextError, TextStream, TextTokenizer};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

#[repr(C)]
pub struct Text {
    data: *mut c_char,
    size: usize,
}

#[repr(C)]
pub struct Ids {
    data: *mut i64,
    size: usize,
}

#[repr(C)]
pub struct SamplingNumbers {
    temperature: f64,
    top_p: f64,
    min_p: f64,
    repetition_penalty: f64,
    presence_penalty: f64,
    frequency_penalty: f64,
    top_k: u64,
    seed: u64,
    has_seed: c_int,
}

/// Return what `work` makes. After an error or a panic, keep the message for qm_text_error and return `failed`.
pub(crate) fn guarded<T>(failed: T, work: impl FnOnce() -> Result<T, TextError>) -> T {
    let error = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(made)) => return made,
        Ok(Err(error)) => error.0,
        Err(panic) => match panic.downcast_ref::<&str>() {
            Some(text) => (*text).into(),
            None => panic.downcast_ref::<String>().cloned().unwrap_or("panic".into()),
        },
    };
    LAST.with(|last| *last.borrow_mut() = CString::new(error.replace('\0', "")).unwrap_or_default());
    failed
}

unsafe fn text<'a>(data: *const c_char, size: usize) -> Result<&'a str, TextError> {
    if size == 0 {
        return Ok("");
    }
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
    std::str::from_utf8(bytes).map_err(|error| TextError(format!("the text is not UTF-8: {error}")))
}

unsafe fn ids<'a>(data: *const i64, size: usize) -> &'a [i64] {
    if size == 0 {
        return &[];
    }
    unsafe { std::slice::from_raw_parts(data, size) }
}

/// Return a boxed slice's memory; it is never null, so that null means failure.
fn given<T, D>(found: Vec<T>) -> (*mut D, usize) {
    let size = found.len();
    (Box::into_raw(found.into_boxed_slice()).cast(), size)
}

fn given_text(found: String) -> Text {
    let (data, size) = given(found.into_bytes());
    Text { data, size }
}

const NO_TEXT: Text = Text { data: null_mut(), size: 0 };

/// Return why the last function of this thread failed.
pub(crate) fn last_error() -> String {
    LAST.with(|last| last.borrow().to_string_lossy().into_owned())
}

#[no_mangle]
pub extern "C" fn qm_text_error() -> *const c_char {
    LAST.with(|last| last.borrow().as_ptr())
}

unsafe fn string<'a>(data: *const c_char) -> Result<&'a str, TextError> {
    let bytes = unsafe { CStr::from_ptr(data) };
    bytes.to_str().map_err(|error| TextError(format!("{}: is not UTF-8: {error}", bytes.to_string_lossy())))
}

/// # Safety
/// `folder` is a string that ends with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn qm_tokenizer_open(folder: *const c_char) -> *mut Arc<TextTokenizer> {
    guarded(null_mut(), || Ok(Box::into_raw(Box::new(Arc::new(TextTokenizer::open(unsafe { string(folder) }?)?)))))
}

/// # Safety
/// `tokenizer` is of qm_tokenizer_open or null, and is not used after this call.
#[no_mangle]
pub unsafe extern "C" fn qm_tokenizer_free(tokenizer: *mut Arc<TextTokenizer>) {
    if !tokenizer.is_null() {
        drop(unsafe { Box::from_raw(tokenizer) });
    }
}

/// # Safety
/// `tokenizer` is open, `data` has `size` bytes.
#[no_mangle]
pub unsafe extern "C" fn qm_tokenizer_encode(
    tokenizer: *const Arc<TextTokenizer>,
    data: *const c_char,
    size: usize,
    special: c_int,
) -> Ids {
    guarded(Ids { data: null_mut(), size: 0 }, || {
        let (data, size) = given(unsafe { (*tokenizer).encode(text(data, size)?, special != 0)? });
        Ok(Ids { data, size })
    })
}

/// # Safety
/// `tokenizer` is open, `data` has `size` ids.
#[no_mangle]
pub unsafe extern "C" fn qm_tokenizer_decode(
    tokenizer: *const Arc<TextTokenizer>,
    data: *const i64,
    size: usize,
    special: c_int,
) -> Text {
    guarded(NO_TEXT, || Ok(given_text(unsafe { (*tokenizer).decode(ids(data, size), special != 0)? })))
}

/// # Safety
/// `tokenizer` is open, `after` has `size` ids, `stop` has `stops` strings that end with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn qm_text_stream_new(
    tokenizer: *const Arc<TextTokenizer>,
    after: *const i64,
    size: usize,
    stop: *const *const c_char,
    stops: usize,
) -> *mut TextStream {
    guarded(null_mut(), || {
        let stop = (0..stops).map(|i| unsafe { string(*stop.add(i)) }.map(str::to_owned));
        let stop = stop.collect::<Result<Vec<_>, _>>()?;
        Ok(Box::into_raw(Box::new(unsafe { TextStream::new(Arc::clone(&*tokenizer), stop, ids(after, size))? })))
    })
}

/// # Safety
/// `stream` is open, and no other thread uses it.
#[no_mangle]
pub unsafe extern "C" fn qm_text_stream_push(stream: *mut TextStream, id: i64) -> Text {
    guarded(NO_TEXT, || Ok(given_text(unsafe { (*stream).push(id)? })))
}

/// # Safety
/// `stream` is open, and no other thread uses it.
#[no_mangle]
pub unsafe extern "C" fn qm_text_stream_end(stream: *mut TextStream) -> Text {
    guarded(NO_TEXT, || Ok(given_text(unsafe { (*stream).end()? })))
}

/// # Safety
/// `stream` is open, and no other thread uses it.
#[no_mangle]
pub unsafe extern "C" fn qm_text_stream_stopped(stream: *const TextStream) -> c_int {
    unsafe { (*stream).stopped() as c_int }
}

/// # Safety
/// `stream` is of qm_text_stream_new or null, and is not used after this call.
#[no_mangle]
pub unsafe extern "C" fn qm_text_stream_free(stream: *mut TextStream) {
    if !stream.is_null() {
        drop(unsafe { Box::from_raw(stream) });
    }
}

/// # Safety
/// `text` is of a function here, and is freed once.
#[no_mangle]
pub unsafe extern "C" fn qm_text_free(text: Text) {
    if !text.data.is_null() {
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(text.data.cast::<u8>(), text.size)) });
    }
}

/// # Safety
/// `ids` is of a function here, and is freed once.
#[no_mangle]
pub unsafe extern "C" fn qm_ids_free(ids: Ids) {
    if !ids.data.is_null() {
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(ids.data, ids.size)) });
    }
}

/// # Safety
/// `folder` is a string that ends with a zero byte, `numbers` may be written.
#[no_mangle]
pub unsafe extern "C" fn qm_sampling_open(folder: *const c_char, numbers: *mut SamplingNumbers) -> c_int {
    guarded(0, || {
        let of = Sampling::of_folder(unsafe { string(folder) }?.as_ref())?;
        let found = SamplingNumbers {
            temperature: of.temperature,
            top_p: of.top_p,
            min_p: of.min_p,
            repetition_penalty: of.repetition_penalty,
            presence_penalty: of.presence_penalty,
            frequency_penalty: of.frequency_penalty,
            top_k: of.top_k as u64,
            seed: of.seed.unwrap_or(0),
            has_seed: of.seed.is_some() as c_int,
        };
        unsafe { *numbers = found };
        Ok(1)
    })
}

/// # Safety
/// `numbers` are there, `prompt` has `size` ids.
#[no_mangle]
pub unsafe extern "C" fn qm_sampler_new(
    numbers: *const SamplingNumbers,
    prompt: *const i64,
    size: usize,
) -> *mut Sampler {
    guarded(null_mut(), || {
        let of = unsafe { &*numbers };
        let sampling = Sampling {
            temperature: of.temperature,
            top_k: of.top_k as usize,
            top_p: of.top_p,
            min_p: of.min_p,
            repetition_penalty: of.repetition_penalty,
            presence_penalty: of.presence_penalty,
            frequency_penalty: of.frequency_penalty,
            seed: (of.has_seed != 0).then_some(of.seed),
        };
        Ok(Box::into_raw(Box::new(Sampler::new(sampling, unsafe { ids(prompt, size) }.iter().copied())?)))
    })
}

/// # Safety
/// `sampler` is open and no other thread uses it, `logits` has `size` numbers.
#[no_mangle]
pub unsafe extern "C" fn qm_sampler_choose(sampler: *mut Sampler, logits: *mut f32, size: usize) -> i64 {
    guarded(-1, || unsafe { (*sampler).choose(std::slice::from_raw_parts_mut(logits, size)) })
}

/// # Safety
/// `sampler` is of qm_sampler_new or null, and is not used after this call.
#[no_mangle]
pub unsafe extern "C" fn qm_sampler_free(sampler: *mut Sampler) {
    if !sampler.is_null() {
        drop(unsafe { Box::from_raw(sampler) });
    }
}

/// # Safety
/// `folder` is a string that ends with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn qm_template_open(folder: *const c_char) -> *mut ChatTemplate {
    guarded(null_mut(), || Ok(Box::into_raw(Box::new(ChatTemplate::open(unsafe { string(folder) }?)?))))
}

/// # Safety
/// `template` is open, `system` is null or a string, `messages` has `count` strings; strings end with a zero byte.
#[no_mangle]
pub unsafe extern "C" fn qm_template_turn(
    template: *const ChatTemplate,
    system: *const c_char,
    messages: *const *const c_char,
    count: usize,
) -> Text {
    guarded(NO_TEXT, || {
        let system = if system.is_null() { None } else { Some(unsafe { string(system) }?) };
        let messages = (0..count).map(|i| unsafe { string(*messages.add(i)) }).collect::<Result<Vec<_>, _>>()?;
        Ok(given_text(unsafe { (*template).turn(system, &messages) }?))
    })
}

/// # Safety
/// `template` is of qm_template_open or null, and is not used after this call.
#[no_mangle]
pub unsafe extern "C" fn qm_template_free(template: *mut ChatTemplate) {
    if !template.is_null() {
        drop(unsafe { Box::from_raw(template) });
    }
}
