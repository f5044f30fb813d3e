//! The native functions of Java's class quantmoe.ChatTemplate. Texts are bytes of UTF-8: Java's own UTF-8 is another.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use crate::c_interface::{guarded, last_error};
use crate::{ChatTemplate, TextError};

type Object = *mut c_void;

/// JNI's table of functions: its first four places are reserved, and a function's place is its number in the specification.
#[repr(transparent)]
pub struct Env(*const [*const c_void; 233]);

const GET_ARRAY_LENGTH: usize = 171;
const GET_OBJECT_ARRAY_ELEMENT: usize = 173;
const NEW_BYTE_ARRAY: usize = 176;
const GET_BYTE_ARRAY_REGION: usize = 200;
const SET_BYTE_ARRAY_REGION: usize = 208;

impl Env {
    /// # Safety
    /// `F` is the type of the function at this place.
    unsafe fn function<F: Copy>(&self, place: usize) -> F {
        unsafe { std::mem::transmute_copy(&(*self.0)[place]) }
    }

    /// # Safety
    /// `array` is a Java array.
    unsafe fn length(&mut self, array: Object) -> i32 {
        unsafe { self.function::<extern "system" fn(&mut Env, Object) -> i32>(GET_ARRAY_LENGTH)(self, array) }
    }

    /// # Safety
    /// `array` is a byte[].
    unsafe fn text(&mut self, array: Object) -> Result<String, TextError> {
        let mut bytes = vec![0u8; unsafe { self.length(array) } as usize];
        type Get = extern "system" fn(&mut Env, Object, i32, i32, *mut u8);
        unsafe { self.function::<Get>(GET_BYTE_ARRAY_REGION)(self, array, 0, bytes.len() as i32, bytes.as_mut_ptr()) };
        String::from_utf8(bytes).map_err(|error| TextError(format!("the text is not UTF-8: {error}")))
    }

    /// # Safety
    /// `array` is an Object[] that has so many.
    unsafe fn element(&mut self, array: Object, at: i32) -> Object {
        type Get = extern "system" fn(&mut Env, Object, i32) -> Object;
        unsafe { self.function::<Get>(GET_OBJECT_ARRAY_ELEMENT)(self, array, at) }
    }

    /// Return a byte[]; null where Java has no memory, and throws.
    fn bytes(&mut self, text: &str) -> Object {
        type New = extern "system" fn(&mut Env, i32) -> Object;
        type Set = extern "system" fn(&mut Env, Object, i32, i32, *const u8);
        let made = unsafe { self.function::<New>(NEW_BYTE_ARRAY)(self, text.len() as i32) };
        if !made.is_null() {
            let set = unsafe { self.function::<Set>(SET_BYTE_ARRAY_REGION) };
            set(self, made, 0, text.len() as i32, text.as_ptr());
        }
        made
    }
}

/// Read a folder's template; 0 is failure.
///
/// # Safety
/// Java calls it with a byte[].
#[no_mangle]
pub unsafe extern "system" fn Java_quantmoe_ChatTemplate_open(
    env: &mut Env,
    _: Object,
    folder: Object,
) -> *const ChatTemplate {
    guarded(null(), || Ok(Box::into_raw(Box::new(ChatTemplate::open(unsafe { env.text(folder) }?)?)).cast_const()))
}

/// Return the last message with all that the template writes around it; null is failure.
///
/// # Safety
/// Java calls it with a template that is open, a byte[] or null, and a byte[][].
#[no_mangle]
pub unsafe extern "system" fn Java_quantmoe_ChatTemplate_turn(
    env: &mut Env,
    _: Object,
    template: *const ChatTemplate,
    system: Object,
    messages: Object,
) -> Object {
    guarded(null_mut(), || {
        let system = if system.is_null() { None } else { Some(unsafe { env.text(system) }?) };
        let mut texts = Vec::new();
        for at in 0..unsafe { env.length(messages) } {
            texts.push(unsafe {
                let message = env.element(messages, at);
                env.text(message)
            }?);
        }
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let turn = unsafe { (*template).turn(system.as_deref(), &texts) }?;
        Ok(env.bytes(&turn))
    })
}

/// Why the last function of this thread failed.
///
/// # Safety
/// Java calls it.
#[no_mangle]
pub unsafe extern "system" fn Java_quantmoe_ChatTemplate_error(env: &mut Env, _: Object) -> Object {
    env.bytes(&last_error())
}

/// # Safety
/// Java calls it once with a template that is open, and does not use the template after this call.
#[no_mangle]
pub unsafe extern "system" fn Java_quantmoe_ChatTemplate_free(_: &mut Env, _: Object, template: *mut ChatTemplate) {
    drop(unsafe { Box::from_raw(template) });
}
