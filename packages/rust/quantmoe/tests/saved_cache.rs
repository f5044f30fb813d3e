mod common;

use std::fs;
use std::thread;
use std::time::Duration;

use common::{all, folder, fresh, greedy, model, Copy};
use quantmoe::{Error, TokenCache};

const PROMPT: [i64; 12] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];

#[test]
fn a_loaded_prompt_goes_on() {
    for name in ["plain", "hybrid"] {
        let (model, copy) = (model(name), Copy::new(&folder(name), &[]));
        let path = copy.0.join("prompt.state");
        let mut cache = TokenCache::going_back(&model).unwrap();
        all(cache.generate(&PROMPT, &greedy(6)).unwrap());
        cache.save(&path).unwrap();
        if let (Some(saved), "hybrid") = (std::env::var_os("QUANTMOE_SAVED"), name) {
            fs::copy(&path, saved).unwrap(); // for Python (tests/packages/helpers.py)
        }
        for (ids, plain, hybrid) in
            [([cache.tokens(), &[20]].concat(), 17, 17), ([&PROMPT[..], &[20, 21]].concat(), 12, 12)]
        {
            let mut loaded = TokenCache::load(&model, &path).unwrap();
            assert_eq!(loaded.tokens(), cache.tokens());
            let kept = loaded.keep(&ids).unwrap();
            assert_eq!(kept, if name == "hybrid" { hybrid } else { plain });
            assert_eq!(all(loaded.generate(&ids[kept..], &greedy(6)).unwrap()), fresh(&model, &ids, 6));
        }
    }
}

#[test]
fn savers_of_one_path_do_not_disturb_each_other() {
    let copy = Copy::new(&folder("hybrid"), &[]);
    let (path, other, link) = (copy.0.join("state"), copy.0.join("state.partial"), copy.0.join("link"));
    fs::write(&other, "another program's").unwrap();
    std::os::unix::fs::symlink("state", &link).unwrap();
    let model = model("hybrid");
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let mut cache = TokenCache::new(&model).unwrap();
                all(cache.generate(&PROMPT, &greedy(3)).unwrap());
                for save in 0..10 {
                    cache.save(if save % 2 == 0 { &path } else { &link }).unwrap();
                    TokenCache::load(&model, &path).unwrap();
                }
            });
        }
    });
    assert!(link.symlink_metadata().unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&other).unwrap(), "another program's");
    let left = fs::read_dir(&copy.0)
        .unwrap()
        .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().ends_with(".partial"));
    assert_eq!(left.count(), 1);
}

#[test]
fn a_file_that_is_no_saved_state_is_not_replaced() {
    let (model, copy) = (model("plain"), Copy::new(&folder("plain"), &[]));
    let notes = copy.0.join("notes");
    let mut cache = TokenCache::new(&model).unwrap();
    all(cache.generate(&PROMPT, &greedy(2)).unwrap());
    for text in ["my notes", "a text of more than eight bytes", "\u{2}\0\0\0\0\0\0\0{}"] {
        fs::write(&notes, text).unwrap();
        let expected =
            format!("{}: is there, and is no saved state: expected an earlier one, or no file", notes.display());
        assert_eq!(cache.save(&notes).unwrap_err().to_string(), expected);
        assert_eq!(fs::read_to_string(&notes).unwrap(), text);
    }
    assert!(cache.save(&copy.0).unwrap_err().to_string().contains("is no saved state"));
    fs::write(&notes, "").unwrap();
    cache.save(&notes).unwrap();
    TokenCache::load(&model, &notes).unwrap();
}

#[test]
fn a_state_that_is_saved_after_a_cancelled_run_is_whole() {
    let more: Vec<i64> = (0..300).map(|i| i * 11 % 4000 + 1).collect();
    for name in ["plain", "hybrid"] {
        let (model, copy) = (model(name), Copy::new(&folder(name), &[]));
        let path = copy.0.join("state");
        let mut ended = 0;
        for i in 0..20 {
            let mut cache = TokenCache::new(&model).unwrap();
            all(cache.generate(&PROMPT, &greedy(2)).unwrap());
            let options = greedy(4);
            let cancel = options.cancel.clone();
            let canceller = thread::spawn(move || {
                thread::sleep(Duration::from_micros(i * 700));
                cancel.cancel();
            });
            ended += cache.generate(&more, &options).unwrap().filter(|id| matches!(id, Err(Error::Cancelled))).count();
            canceller.join().unwrap();
            cache.save(&path).unwrap();
            let mut loaded = TokenCache::load(&model, &path).unwrap();
            assert_eq!(loaded.tokens(), cache.tokens());
            let expected = fresh(&model, &[cache.tokens(), &[50, 51]].concat(), 4);
            assert_eq!(all(loaded.generate(&[50, 51], &greedy(4)).unwrap()), expected);
        }
        assert!(ended > 0);
    }
}

#[test]
fn wrong_files_are_refused_by_name() {
    let (plain, hybrid, copy) = (model("plain"), model("hybrid"), Copy::new(&folder("plain"), &[]));
    let path = copy.0.join("prompt.state");
    let mut cache = TokenCache::new(&plain).unwrap();
    assert!(cache.save(&path).unwrap_err().to_string().contains("has no tokens to save"));
    all(cache.generate(&PROMPT, &greedy(2)).unwrap());
    cache.save(&path).unwrap();
    let refused = |model, expected: &str| {
        let error = TokenCache::load(model, &path).err().unwrap();
        assert!(error.to_string().starts_with(&format!("{}: {expected}", path.display())), "{error}");
    };
    refused(&hybrid, "saved with another model");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.len() - 9;
    bytes[at] ^= 1;
    fs::write(&path, &bytes).unwrap();
    refused(&plain, "was altered or is damaged");
    for (length, expected) in [(5, "5 bytes, expected a safetensors file"), (100, "a header of")] {
        fs::write(&path, &bytes[..length]).unwrap();
        refused(&plain, expected);
    }
    fs::write(&path, [&4u64.to_le_bytes()[..], b"{]  "].concat()).unwrap();
    refused(&plain, "corrupt header");
    let nowhere = copy.0.join("nowhere/prompt.state");
    assert!(matches!(cache.save(&nowhere), Err(Error::File(path, _)) if path == nowhere));
    assert!(fs::read_dir(&copy.0).unwrap().all(|file| !file.unwrap().path().to_string_lossy().ends_with(".partial")));
}
